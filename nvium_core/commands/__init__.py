"""The commands of `nvium`, a function each. Imports happen where they are used, so help is instant."""
