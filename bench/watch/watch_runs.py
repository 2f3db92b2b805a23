"""Polls a user's file, and lets a child process judge each save.  A newer save ends the work for the older one."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

from rooflab.bench.base.plain import JsonObject, Row, plain
from rooflab.bench.base.system_time import time
from rooflab.bench.core import Child, ChildFailed

WORKER = ("rooflab.bench.watch.preload", "rooflab.bench.watch.watch_worker")
POLL_S = 0.25  # between two looks at the file
EMPTY: JsonObject = {
    "source": [], "running": False, "kernel": "", "verdict": "", "sentence": "", "findings": [],
    "emulated": None, "compiled": None, "measured": None, "cells": [],
}  # fmt: skip
"""The fields of the state that belong to one save, before anything is known."""


class FileWatch:
    """Watches one file, and holds the state of the page, which `updates` gives to each client.

    `options` go to `SavedKernel.load`.  The state's `version` counts its changes, and `save` the versions of the file.
    `last` has the bytes of the newest earlier save that was right."""

    def __init__(self, file: Path, limit_s: float, **options: str | None):
        self.file, self._limit_s, self._options = file, limit_s, {**options, "limit_s": limit_s}
        self._changed = threading.Condition()
        # In the user's own cache of Triton, code of a copied file names the lines of the file that it was copied from.
        self._cache = TemporaryDirectory(prefix="rooflab-watch-")
        self._content: bytes | None = None
        self.state: Row = {"version": 0, "save": 0, "time": "", "file": file.name, "backend": "", "last": None, **EMPTY}
        self._put({})

    def run(self) -> None:
        """Judges each save until an exception, such as `KeyboardInterrupt`, ends it.  Then ends its processes."""
        self._begin_child()
        try:
            while True:
                if self._is_stale() and self._begin():
                    self._judge()
                time.sleep(POLL_S)
        finally:
            self._child.stop()
            self._cache.cleanup()

    def updates(self, wait_s: float) -> Iterator[bytes]:
        """Yields the state as JSON, and again after each change; nothing (b"") after `wait_s` seconds without one."""
        seen = b""
        while True:
            with self._changed:
                if self.text == seen:
                    self._changed.wait(wait_s)
                text = self.text
            yield text if text != seen else b""
            seen = text

    def _begin_child(self) -> None:
        """Starts the child for the next save early.  It loads torch, the kernels and a compiler before that save."""
        options = {"ROOFLAB_WATCH_BACKEND": self.state["backend"], "ROOFLAB_EMULATE_SECONDS": str(self._limit_s)}
        self._child = Child(*WORKER, environment={**options, "TRITON_CACHE_DIR": self._cache.name})

    def _read(self) -> bytes | None:
        with suppress(OSError):
            return self.file.read_bytes()
        return None

    def _is_stale(self) -> bool:
        return self._read() != self._content

    def _put(self, fields: JsonObject) -> None:
        with self._changed:
            state = {**self.state, **fields, "version": self.state["version"] + 1}
            state["faults"] = faults_in(self.file.name, [state["sentence"], *state["findings"]])
            self.state, self.text = state, json.dumps(plain(state), allow_nan=False).encode()
            self._changed.notify_all()

    def _begin(self) -> bool:
        """Shows the new source, beside the bytes of the last right save.  Returns False if the file is gone."""
        before, self._content = self.state, self._read()
        is_right = before["verdict"] == "right" and before["emulated"]
        last = {"save": before["save"], **before["emulated"]} if is_right else before["last"]
        source, now = (self._content or b"").decode(errors="replace").splitlines(), f"{datetime.now():%H:%M:%S}"
        fields: Row = {"save": before["save"] + 1, "time": now, "source": source, "running": True}
        if self._content is None:
            fields = {"verdict": "wrong", "sentence": f"{self.file.name} is gone: it is judged when it is back."}
        self._put({**EMPTY, "last": last, **fields})
        return self._content is not None

    def _judge(self) -> None:
        """Shows what a child says of this version, piece by piece, until a newer version is there."""
        child, is_used = self._child, True
        try:
            child.start()
            if not (is_used := not self._is_stale()):
                return  # the same child serves the newer version
            request = {"file": str(self.file), **self._options}
            deadline_s = time.monotonic() + 2 * self._limit_s  # for the import of the file
            hangs = lambda: self._is_stale() or (not self.state["kernel"] and time.monotonic() > deadline_s)
            for piece in child.stream(request, inf, hangs):
                if self._is_stale():
                    return
                self._put(piece)
                if self.state["verdict"] and self._child is child:
                    self._begin_child()
        except ChildFailed as failed:
            if not self._is_stale():
                self._put({"verdict": "wrong", "sentence": f"{self.file.name}: its process failed: {failed}"})
        finally:
            if is_used:
                child.stop()
            if is_used and self._child is child:
                self._begin_child()
            self._put({"running": False})


def faults_in(name: str, texts: list[str]) -> dict[int, str]:
    """Returns, for each line of the file `name` that a text names (`mine.py:7`, `mine.py, line 7`), the first text."""
    place = re.compile(rf'\b{re.escape(name)}"?(?::|, line )(\d+)')
    return {int(line): text for text in reversed(texts) for line in place.findall(text)}
