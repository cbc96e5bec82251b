"""Lines of shell as the commands they are made of."""

import shlex
from dataclasses import dataclass

OPERATORS = {"&&", "||", "|", ";", "&"}


@dataclass(frozen=True)
class Command:
    """Words of one command; `variables` were set before it, `output` is the file its output goes to."""

    words: tuple[str, ...]
    variables: tuple[str, ...] = ()
    output: str | None = None

    @property
    def text(self) -> str:
        return " ".join(self.words)


def commands(text: str) -> list[Command]:
    """Of one block or span. Nothing is expanded: `$PWD` and `*` stay what they are."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word in OPERATORS:
                found += [command(words)] if words else []
                words = []
            else:
                words.append(word)
    return found


def command(words: list[str]) -> Command:
    output = None
    if ">" in words:
        place = words.index(">")
        output = words[place + 1]
        words = words[:place] + words[place + 2 :]
    is_setting = [("=" in word and word.split("=")[0].isupper()) for word in words]
    begin = is_setting.index(False) if False in is_setting else len(words)
    return Command(tuple(words[begin:]), tuple(words[:begin]), output)
