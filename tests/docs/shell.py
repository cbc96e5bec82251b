"""Splits shell text into commands."""

import shlex

OPERATORS = {"&&", "||", "|", ";", "&"}


def commands(text: str) -> list[list[str]]:
    """Return the words of each command in a block or span, without variables set before it and without redirections.

    Nothing is expanded: `$PWD` and `*` are returned as written.
    """
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word in OPERATORS:
                found.append(command(words))
                words = []
            else:
                words.append(word)
    return [words for words in found if words]


def command(words: list[str]) -> list[str]:
    if ">" in words:
        place = words.index(">")
        words = words[:place] + words[place + 2 :]
    while words and "=" in words[0] and words[0].partition("=")[0].isupper():
        words = words[1:]
    return words
