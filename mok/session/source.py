"""Which commit the running code is of: a number without it cannot be looked up later."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def commit_of(folder: Path) -> str:
    """git's answer for the checkout `folder`, with `-dirty` after it when tracked files of mok/ or csrc/ differ; else MOK_COMMIT.

    A copy without its history (a machine one ships the tree to) says it with MOK_COMMIT; "unknown" without either.
    """

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False, timeout=20)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    top = git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != folder:  # the folder of another project, say one that has us in its environment
        return os.environ.get("MOK_COMMIT") or "unknown"
    found = git("rev-parse", "HEAD") or "unknown"
    return f"{found}-dirty" if git("status", "--porcelain", "--untracked-files=no", "--", "mok", "csrc") else found
