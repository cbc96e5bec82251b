"""What `nvium` can be told to do, a function each. Imports are made where they are used, so help is instant."""
