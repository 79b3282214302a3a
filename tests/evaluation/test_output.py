"""Progress is a bar on a terminal and lines in a log; stdout holds the table alone."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

from kvpop_vllm.evaluation.output import note_kernels

SCRIPT = """
from kvpop_vllm import progress
progress.SECONDS = 0
print("table")
with progress.progress(4, "text") as tick:
    for _ in range(8):
        tick(0.5)
    tick(0.1)  # more than was expected
"""


def test_progress_in_a_log():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout == "table\n"
    lines = done.stderr.splitlines()
    assert lines[0].startswith("text:   0%, 00:00 so far") and lines[-1].startswith("text: 100%")
    assert [line.split("%")[0].split()[-1] for line in lines[1:5]] == ["12", "25", "38", "50"]


def test_progress_on_a_terminal():
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    done = subprocess.run([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=end, text=True, check=True)
    os.close(end)
    shown = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert done.stdout == "table\n" and "100%|" in shown and "\r" in shown


def test_slow_kernels_are_named(monkeypatch, capsys):
    note_kernels()
    assert not capsys.readouterr().err
    # as in an installation without a compiler
    monkeypatch.setitem(sys.modules, "kvpop_vllm._C", None)
    note_kernels()
    assert capsys.readouterr().err.startswith("policies on the CPU have no C++ kernels and are about ten times slower:")
