"""Where a checkpoint directory is written, and how it appears there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from lightning_zero.checkpoint.commit import Staging, local_path

__all__ = ["Destination", "LocalDestination"]


class Destination(Protocol):
    """One save of one directory, on one rank."""

    @property
    def path(self) -> Path:
        """The folder this rank writes its files to, once it was entered."""

    @property
    def suffix(self) -> str:
        """What file names end in, before their extension, where names must be new with every save; else nothing."""

    def begin(self) -> str:
        """Rank 0: get ready. Returns what the other ranks need to enter."""

    def enter(self, token: str) -> None:
        """Every rank, with what rank 0's ``begin`` returned."""

    def deliver(self, names: Sequence[str]) -> None:
        """Any rank: let everybody see files that are complete. They are no checkpoint yet."""

    def sizes(self) -> Mapping[str, int]:
        """Rank 0: what everybody sees: bytes by file name."""

    def commit(self) -> None:
        """Rank 0: publish, in one step, once every file is delivered and the record is in ``path``."""

    def discard(self) -> None:
        """Every rank, at the end: delete what was not published. Never raises."""


class LocalDestination:
    """A directory on a file system that all ranks share. See [Note: Publishing].

    Args:
        final: where the checkpoint shall be.
    """

    suffix = ""

    def __init__(self, final: str | os.PathLike[str]) -> None:
        self._final = final
        self._staging: Staging | None = None  # on rank 0
        self.path = Path()

    def begin(self) -> str:
        """See ``Destination``."""
        self._staging = Staging(local_path(self._final))
        return str(self._staging.path)

    def enter(self, token: str) -> None:
        """See ``Destination``."""
        self.path = Path(token)
        if not self.path.is_dir():
            raise FileNotFoundError(
                f"'{self.path.parent}' is not the folder that rank 0 sees: use a shared file system"
            )

    def deliver(self, names: Sequence[str]) -> None:
        """See ``Destination``."""

    def sizes(self) -> Mapping[str, int]:
        """See ``Destination``."""
        return {entry.name: entry.stat().st_size for entry in os.scandir(self.path)}

    def commit(self) -> None:
        """See ``Destination``."""
        if self._staging is not None:
            self._staging.publish()

    def discard(self) -> None:
        """See ``Destination``."""
        if self._staging is not None:
            self._staging.discard()
