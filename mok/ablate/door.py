"""The door papermill knocks at: its entry point for engine `mok`, light enough to be loaded with papermill itself.

papermill loads every engine while it is being imported. An engine that imports papermill would meet itself half made, so
this one imports the real engine when a notebook is run.
"""

from __future__ import annotations

from typing import Any


class MokEngine:
    """`mok.ablate.engine.MokEngine`, imported at its first use."""

    @classmethod
    def execute_notebook(cls, nb: Any, kernel_name: str, **options: Any) -> Any:
        """Run a parameterised notebook; see the engine."""
        from mok.ablate import engine

        return engine.MokEngine.execute_notebook(nb, kernel_name, **options)

    @classmethod
    def nb_kernel_name(cls, nb: Any, name: str | None = None) -> str:
        """Always this interpreter."""
        from mok.ablate import engine

        return engine.MokEngine.nb_kernel_name(nb, name)

    @classmethod
    def nb_language(cls, nb: Any, language: str | None = None) -> str:
        """Python."""
        from mok.ablate import engine

        return engine.MokEngine.nb_language(nb, language)
