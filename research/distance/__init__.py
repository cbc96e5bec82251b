"""The distance of engines to a reference in float32."""
