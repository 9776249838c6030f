"""Run a command that may be silent for long, and say every few seconds that it goes on.

    python .ci/telling.py WHAT COMMAND …

Of what pip says, what arrives is named, and nothing else; what other commands say is passed on. Errors are theirs, and
so is the status. It needs no more than a Python that is being set up has.
"""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time

SAY_EVERY_S = 3.0


def named(line: str) -> str:
    """What is told of a line of pip's; empty: nothing."""
    words = line.split()
    if words[:1] == ["Downloading"] and len(words) > 1:
        return f"  {words[1]}"
    if words[:2] == ["Using", "cached"] and len(words) > 2:
        return f"  {words[2]}"
    return "  installing what arrived …" if words[:2] == ["Installing", "collected"] else ""


def main(what: str, command: list[str]) -> int:
    began = time.monotonic()
    print(what, flush=True)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines: queue.Queue[str | None] = queue.Queue()  # None: there will be no more

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    is_pip = any(word.endswith("pip") for word in command)
    while True:
        try:
            line = lines.get(timeout=SAY_EVERY_S)
        except queue.Empty:
            print(f"  … {what} ({time.monotonic() - began:.0f} s)", flush=True)
            continue
        if line is None:
            return process.wait()
        told = named(line) if is_pip else line.rstrip()
        if told:
            print(told, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
