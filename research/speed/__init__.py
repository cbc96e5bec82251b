"""Speed on a CPU and over HTTP."""
