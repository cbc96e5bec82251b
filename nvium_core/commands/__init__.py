"""The commands of `nvium`, one function each. They import late, so that help is instant."""
