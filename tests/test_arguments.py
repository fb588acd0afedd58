"""How every command ends: well, with one line about what is wrong, or quietly when nobody reads."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from peagle_jax.arguments import check_extra, run_command
from peagle_jax.config import ConfigError


def test_a_mistake_is_one_line_and_status_2(monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)

    def fails():
        raise ConfigError("found this;\n expected that")

    assert run_command(fails) == 2
    assert stderr.getvalue() == "error: found this; expected that\n"


def in_a_process(code: str, stdout: int, **environment: str) -> tuple[int, bytes, str]:
    """Exit status, stdout (if it is a pipe) and stderr of a command with this body."""
    body = "\n".join(f"    {line}" for line in code.splitlines())
    script = "import sys\nfrom peagle_jax.arguments import CommandError, run_command\n"
    script += f"def main():\n{body}\n    return 0\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{script}sys.exit(run_command(main))"],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env=os.environ | environment,
        cwd=Path(__file__).parents[1],
    )
    return done.returncode, done.stdout, done.stderr.decode()


@pytest.mark.parametrize("code", ["print('x')", "print('x' * 10**6)\nsys.exit(0)"])
def test_a_reader_that_has_left_ends_a_command_quietly(code):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        status, _, err = in_a_process(code, writer)
    finally:
        os.close(writer)
    assert (status, err) == (141, "")


def test_a_full_disk_is_one_line():
    with open("/dev/full", "wb") as full:
        status, _, err = in_a_process("print('x')", full.fileno())
    assert (status, err) == (2, "error: No space left on device; run it again when that is mended\n")


def test_closed_outputs_are_there_for_libraries():
    code = "sys.stdout = sys.stderr = None\nimport os\nos.close(1)\nos.close(2)"
    code = f"{code}\nsys.exit(run_command(lambda: 3 + sys.stdout.isatty() + sys.stderr.isatty()))"
    assert in_a_process(code, subprocess.PIPE) == (3, b"", "")


def test_a_terminal_that_knows_ascii_only_shows_escapes():
    code = "print('caf\\xe9')\nraise CommandError('na\\xefve')"
    status, out, err = in_a_process(code, subprocess.PIPE, PYTHONIOENCODING="ascii")
    assert (status, out, err) == (2, b"caf\\xe9\n", "error: na\\xefve\n")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (FileNotFoundError(2, "No such file or directory", "a.txt"), "a.txt: No such file or directory"),
        (OSError(36, "File name too long", "x" * 5000), "x" * 80 + ": File name too long"),
        (OSError("plain\nwords"), "plain words"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_an_error_of_the_system_is_one_line_and_status_2(capsys, error, line):
    def fails():
        raise error

    assert run_command(fails) == 2
    assert capsys.readouterr().err == f"error: {line}; run it again when that is mended\n"


def test_other_errors_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: 1 // 0)


@pytest.mark.parametrize("module", ["peagle_jax.generate", "elsewhere"])
def test_ctrl_c_ends_only_a_commands_imports_without_a_trace(module):
    code = f"""
import os, signal, sys
sys.argv, sys.orig_argv = ["-m"], ["python", "-m", {module!r}]
from peagle_jax.arguments import run_command
try:
    os.kill(os.getpid(), signal.SIGINT) if sys.stdin.read() else run_command(lambda: signal.raise_signal(2))
except KeyboardInterrupt:
    print("caught")
"""
    run = partial(subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True)
    while_importing, after = run(input="now"), run(input="")
    ours = module.startswith("peagle_jax")
    assert (while_importing.returncode, while_importing.stdout) == ((-2, "") if ours else (0, "caught\n"))
    assert while_importing.stderr == ""
    assert (after.returncode, after.stdout, after.stderr) == (0, "", "")


def test_a_package_that_is_not_installed_is_one_line_and_status_2(monkeypatch, capsys):
    check_extra("serve", "numpy", "jax")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(SystemExit) as end:
        check_extra("serve", "numpy", "llguidance")
    assert end.value.code == 2
    said = "the package llguidance is not installed; pip install 'peagle_jax[serve]'"
    assert said in capsys.readouterr().err
