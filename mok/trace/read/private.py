"""What a profiler wrote down that nobody meant to share, and how texts lose it.

nsys stores every environment variable, the command line, host and user names and the machine's process list; Kineto
stores whatever a job adds to its trace. Readers keep none of that, but such words also stand inside texts that are
kept: a home directory in a Python frame, a host name in a thread's name. `Private` learns the words from the file
itself and takes them out of every kept text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

REDACTED = "[redacted]"
MIN_NAME = 3  # shorter user and host names, and shorter values of variables, occur in ordinary words
MIN_SECRET = 4
MIN_VALUE = 8
_MAX_DEPTH = 8
_HOME_MARKS = ("/home/", "/Users/", "/root/", "Users\\")
_COMMON = frozenset(
    ("root", "user", "users", "ubuntu", "nobody", "admin", "local", "localhost", "python", "python3", "none", "default")
)
_NOTHING_PRIVATE = re.compile(r"/(usr|bin|sbin|opt|lib|lib64|etc|tmp|var|dev|proc|sys)(/|:|$)|[\d.,:;+-]*$")
# Switches and sizes are no secrets, whatever their variable is called (TOKENIZERS_PARALLELISM=false, XDG_SESSION_CLASS=user,
# MAX_TOKENS=4096): taken out of every text they would spell kernels' names anew.
_NO_SECRET = re.compile(
    r"true|false|none|null|auto|user|users|root|tty|x11|wayland|yes|enabled?|disabled?|unspecified|greeter|default|background|"
    r"[+-]?\d{1,7}(?:\.\d+)?",
    re.IGNORECASE,
)
_SECRET_NAME = re.compile(r"TOKEN(?!IZ)|SECRET|PASS|KEY|AUTH|CRED|COOKIE|SESSION|LICEN[CS]E|PRIVATE", re.IGNORECASE)
_WHO_NAME = re.compile(
    r"(^|[_:. ])(USER|USERNAME|LOGNAME|LOGIN|HOST|HOSTNAME|NODENAME|NODE_?LIST|DISPLAY_NAME|USER_NAME|EXPORT_USER)$",
    re.IGNORECASE,
)
_ASSIGNMENT = re.compile(r"(?:^|[\n\0])([A-Za-z_][A-Za-z0-9_.%()-]{0,127})=([^\n\0]*)")
_ONE_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,127})=([^\n\0]+)")
# `--api-key=VALUE`, `--token VALUE`: a secret on a command line stands alone elsewhere
_FLAG = re.compile(r"--?([A-Za-z][\w-]{0,127})(?:=|\s+)[\"']?([^\s\"'-][^\s\"']*)")
# A home directory and what lies below it: only the last name stays, and what follows site-packages is everybody's.
_HOME = re.compile(
    # a folder's name may hold blanks inside ("/Users/John Doe/x.py"), the last name ends at the first blank
    r"(?:/home/|/Users/|/root/|[A-Za-z]:\\+Users\\+)(?:[^\s\"'<>|:;,()\[\]{}/\\]+(?: [^\s\"'<>|:;,()\[\]{}/\\]+)*[/\\]+)*"
    r"[^\s\"'<>|:;,()\[\]{}/\\]*"
)
_SHARED_PART = re.compile(r"(?:site|dist)-packages[/\\].*")


@dataclass
class Private:
    """Words of one file that must not leave it. `learn*` collect them, `scrub` takes them out of texts.

    words stand for themselves only ("ann" is not taken out of "annotate"); secrets, the values of variables whose name
    says so, are taken out wherever they stand.
    """

    words: set[str] = field(default_factory=set)
    secrets: set[str] = field(default_factory=set)

    def learn(self, name: str, value: str) -> None:
        """One variable, setting or top-level entry: its value is private, the more so if the name says secret or who."""
        value = value.strip().strip("\"'")
        for flag, given in _FLAG.findall(value):
            if _SECRET_NAME.search(flag) and len(given) >= MIN_SECRET:
                self._learn_secret(given)
        if pair := _ONE_ASSIGNMENT.fullmatch(value):  # environments also come as lists of "NAME=value"
            self._learn_value(pair[1], pair[2].strip("\"'"))
        self._learn_value(name, value)

    def _learn_value(self, name: str, value: str) -> None:
        if _WHO_NAME.search(name):
            for part in {value, value.split(".")[0]}:  # a host is also known without its domain
                if len(part) >= MIN_NAME and part.lower() not in _COMMON:
                    self.words.add(part)
        elif _SECRET_NAME.search(name) and len(value) >= MIN_SECRET:
            self._learn_secret(value)
        elif len(value) >= MIN_VALUE and not _NOTHING_PRIVATE.match(value):
            self.words.add(value)

    def _learn_secret(self, value: str) -> None:
        """A secret is taken out wherever it stands; one of letters alone only where it is a word of its own."""
        if not _NO_SECRET.fullmatch(value):
            (self.words if value.isalpha() and len(value) < MIN_VALUE else self.secrets).add(value)

    def learn_tree(self, key: str, value: object, depth: int = 0) -> None:
        """Learn the texts below an entry of no public name; an entry of an environment goes by its own name."""
        if isinstance(value, dict) and depth < _MAX_DEPTH:
            for name, inner in value.items():
                self.learn_tree(str(name), inner, depth + 1)
        elif isinstance(value, list) and depth < _MAX_DEPTH:
            for inner in value:
                self.learn_tree(key, inner, depth + 1)
        elif isinstance(value, str):
            self.learn(key, value)
            self.learn_block(value)

    def learn_block(self, text: str) -> bool:
        """Learn an environment block (`NAME=value` lines or NUL-separated); False if `text` is none."""
        pairs = _ASSIGNMENT.findall(text)
        if len(pairs) < 2:
            return False
        for name, value in pairs:
            self.learn(name, value)
        return True

    def pattern(self, whole: str) -> re.Pattern[str] | None:
        """What to take out of `whole`; None if nothing of it is private. Only what occurs is compiled."""
        found = [(word, rf"(?<!\w){re.escape(word)}(?!\w)") for word in self.words if word in whole]
        found += [(word, re.escape(word)) for word in self.secrets if word in whole]
        found.sort(key=lambda pair: -len(pair[0]))
        return re.compile("|".join(expression for _, expression in found)) if found else None

    def has_home(self, whole: str) -> bool:
        """True if `whole` may hold a home directory."""
        return any(mark in whole for mark in _HOME_MARKS)

    def scrub(self, texts: Sequence[str]) -> list[str]:
        """The texts without private words and home directories."""
        whole = "\n".join(texts)
        pattern, homes = self.pattern(whole), self.has_home(whole)
        if pattern is None and not homes:
            return list(texts)
        return [_clean(text, pattern, homes) for text in texts]

    def scrub_one(self, text: str) -> str:
        """`scrub` for one text."""
        return self.scrub([text])[0]


def _clean(text: str, pattern: re.Pattern[str] | None, homes: bool) -> str:
    if homes:
        text = _HOME.sub(lambda match: _tail(match[0]), text)
    return pattern.sub(REDACTED, text) if pattern is not None else text


def _tail(path: str) -> str:
    shared = _SHARED_PART.search(path)
    parts = [part for part in re.split(r"[/\\]+", path) if part and not part.endswith(":")]  # a drive is no folder
    last = parts[-1] if len(parts) > 2 else ""  # /home/name alone has no part that is not the name
    return "~/" + (shared[0] if shared else last)
