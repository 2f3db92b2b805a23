"""Polls a user's file, and lets a child process judge each save.  A newer save ends the work for the older one."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from rooflab.bench.base.plain import JsonObject, Row
from rooflab.bench.base.system_time import time
from rooflab.bench.core import Child, ChildFailed

WORKER = ("rooflab.bench.watch.preload", "rooflab.bench.watch.watch_worker")
POLL_S = 0.25
"""Seconds between two looks at the file."""
STEP_S = 3600.0
"""The longest time of a child's step.  The steps that run the kernel have limits of their own."""
EMPTY: JsonObject = {
    "source": [], "running": False, "kernel": "", "verdict": "", "sentence": "", "findings": [],
    "count": {"right": 0, "tried": 0}, "emulated": None, "compiled": None, "measured": None, "cells": [],
}  # fmt: skip
"""The fields of the state that belong to one save, before anything is known."""


class Watch:
    """Watches one file, and holds the state of the page, which `updates` gives to each client.

    `options` are the fields of `Watched.load`.  The state's `version` counts its changes, and `save` the versions of
    the file.  `last` has the bytes of the newest earlier save that was right."""

    _child: Child
    """The child for the next save, which loads torch, the kernels and a compiler while nobody waits."""

    def __init__(self, file: Path, limit_s: float, **options: str | None):
        self.file, self._limit_s, self._options = file, limit_s, {**options, "limit_s": limit_s}
        self._changed = threading.Condition()
        self._content: bytes | None = b""
        self.state: Row = {"version": 0, "save": 0, "time": "", "file": file.name, "backend": "", "last": None, **EMPTY}

    def run(self) -> None:
        """Judges each save until an exception, such as `KeyboardInterrupt`, ends it.  Then ends its processes."""
        self._begin_child()
        try:
            while True:
                if self._is_stale():
                    self._begin()
                    if self._content is not None:
                        self._judge()
                time.sleep(POLL_S)
        finally:
            self._child.stop()

    def updates(self, wait_s: float) -> Iterator[Row | None]:
        """Yields the state, and again after each change; None after `wait_s` seconds without a change."""
        seen = -1
        while True:
            with self._changed:
                if self.state["version"] == seen:
                    self._changed.wait(wait_s)
                state = self.state
            yield state if state["version"] != seen else None
            seen = state["version"]

    def _begin_child(self) -> None:
        environment = {"ROOFLAB_WATCH_BACKEND": self.state["backend"], "ROOFLAB_EMULATE_SECONDS": str(self._limit_s)}
        self._child = Child(*WORKER, environment=environment)

    def _read(self) -> bytes | None:
        """Returns the file's content, or None if there is no file.  An editor may replace it, so it is read twice."""
        for _ in range(2):
            try:
                return self.file.read_bytes()
            except OSError:
                time.sleep(POLL_S)
        return None

    def _is_stale(self) -> bool:
        return self._read() != self._content

    def _put(self, fields: JsonObject) -> None:
        with self._changed:
            state = {**self.state, **fields, "version": self.state["version"] + 1}
            state["faults"] = faults_in(self.file.name, [state["sentence"], *state["findings"]])
            self.state = state
            self._changed.notify_all()

    def _begin(self) -> None:
        """Shows the new source.  Keeps the bytes of the version before if that one was right."""
        before, self._content = self.state, self._read()
        is_right = before["verdict"] == "right" and before["emulated"]
        last = {"save": before["save"], **before["emulated"]} if is_right else before["last"]
        fields: Row = {"verdict": "wrong", "sentence": f"{self.file.name} is gone: it is judged when it is back."}
        if self._content is not None:
            source = self._content.decode(errors="replace").splitlines()
            save = {"save": before["save"] + 1, "time": f"{datetime.now():%H:%M:%S}"}
            fields = {**save, "source": source, "running": True}
        self._put({**EMPTY, "last": last, **fields})

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
            for piece in child.stream(request, STEP_S, hangs):
                if self._is_stale():
                    return
                self._put(piece)
                if self._child is child:
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
