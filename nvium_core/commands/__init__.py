"""The commands of `nvium`. Each is a function, and imports slow modules only when it runs, so that help is instant."""
