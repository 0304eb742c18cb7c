"""What judges answered in a run, on the disk before it is used: resume and replay read it and ask no server.

A file for each rank, `rank_N.jsonl`, an object a line: the digest of the question, the problem's uid, the answer or why
there is none, and what it cost. A question that is asked again elsewhere in the stream gets the same answer at no cost,
under its own uid.
"""

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from grpo_fn.shell.atomic_io import flush_file, no_space, to_json

Place = tuple[Path | None, int, int]  # file, offset and bytes of a line; no file: a line that is only in memory


class JudgeAnswer(NamedTuple):
    """What a question came to, and what it cost."""

    text: str | None  # None: it was not answered
    failure: str = ""  # why not
    fatal: bool = False  # no other question would be answered either
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0  # from its first request to its end


class RecordedAnswer(NamedTuple):
    """An entry of the record."""

    digest: str
    uid: int
    answer: JudgeAnswer


class JudgeRecord:
    """The answers of a run, or of this process where `folder` is None. Any thread may ask.

    Nothing is read before the first question, and nothing is written before the first answer. Where `read_only`, as
    replay has it, nothing is asked or written.
    """

    def __init__(self, folder: Path | None, rank: int) -> None:
        self.folder, self.rank, self.read_only = folder, rank, False
        self._places: dict[tuple[str, int], Place] = {}
        self._answered: dict[str, tuple[str, int]] = {}  # by digest: an entry with an answer
        self._memory: list[bytes] = []
        self._opened, self._lock = False, threading.Lock()

    def find(self, digest: str, uid: int) -> JudgeAnswer | None:
        """What was answered to this question about the problem of this uid."""
        with self._lock:
            self._open()
            return self._read(self._places[digest, uid]) if (digest, uid) in self._places else None

    def find_elsewhere(self, digest: str) -> JudgeAnswer | None:
        """What was answered to this question about any problem."""
        with self._lock:
            self._open()
            return self._read(self._places[self._answered[digest]]) if digest in self._answered else None

    def add(self, entries: Sequence[RecordedAnswer]) -> None:
        """Write entries; they are on the disk when this returns. Raises NoSpace where the disk is full."""
        lines = [_line(entry) for entry in entries]
        with self._lock:
            self._open()
            path, start = self._append(b"".join(lines))
            for place, (entry, line) in enumerate(zip(entries, lines, strict=True)):
                self._note(entry, (path, start if path else start + place, len(line)))
                start += len(line) if path else 0
            if path is None:
                self._memory += lines

    def _append(self, data: bytes) -> tuple[Path | None, int]:
        """Put the bytes at the end of this rank's file; the file and where they begin."""
        if self.folder is None:
            return None, len(self._memory)
        path = self.folder / f"rank_{self.rank}.jsonl"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                start = os.fstat(file.fileno()).st_size
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if start == 0:
                flush_file(self.folder)
        except OSError as error:
            if error.errno in (28, 122):  # ENOSPC, EDQUOT
                raise no_space(path, len(data)) from error
            raise
        return path, start

    def _open(self) -> None:
        """Find the entries of all ranks; of two about one question, this rank's own counts."""
        if self._opened:
            return
        self._opened = True
        if self.folder is None or not self.folder.is_dir():
            return
        own = self.folder / f"rank_{self.rank}.jsonl"
        others = [path for path in sorted(self.folder.glob("rank_*.jsonl")) if path != own]
        for path in (*others, own):
            if path.is_file():
                self._open_file(path, own=path == own)

    def _open_file(self, path: Path, *, own: bool) -> None:
        end = 0
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break  # torn: the process was killed while it wrote
                self._note(_entry(path, line), (path, end, len(line)))
                end += len(line)
        if own and not self.read_only and path.stat().st_size > end:
            os.truncate(path, end)

    def _note(self, entry: RecordedAnswer, place: Place) -> None:
        self._places[entry.digest, entry.uid] = place
        if entry.answer.text is not None:
            self._answered.setdefault(entry.digest, (entry.digest, entry.uid))

    def _read(self, place: Place) -> JudgeAnswer:
        path, start, size = place
        if path is None:
            return _entry(Path("memory"), self._memory[start]).answer
        with path.open("rb") as file:
            file.seek(start)
            return _entry(path, file.read(size)).answer


def _line(entry: RecordedAnswer) -> bytes:
    return (to_json({"digest": entry.digest, "uid": entry.uid, **entry.answer._asdict()}) + "\n").encode("ascii")


def _entry(path: Path, line: bytes) -> RecordedAnswer:
    try:
        row = json.loads(line)
        return RecordedAnswer(row.pop("digest"), row.pop("uid"), JudgeAnswer(**row))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: got {line[:200]!r}, wanted a recorded answer of a judge") from error
