"""What `make setup` runs: installs the lab and all that its tests need into .venv; a failure is one sentence.

Runs on the Python that it finds, which may be too old for the lab, so it is written for any Python 3.
"""

import os
import re
import subprocess
import sys

LEAST = (3, 11)
PYTHON = os.path.join(".venv", "bin", "python")
# Compiled at the first import instead: to compile all of torch and what no test imports took 97 of 188 s.
PIP = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile", "-c", "constraints.txt"]
LOG = os.path.join(".venv", "setup.log")
CAUSES = [
    (r"No space left on device", "the disk is full: set-up needs 3 GB for a CPU build of torch, 8 GB for a CUDA build"),
    (
        r"No matching distribution found for (\S+)",
        "{0} has no build for this Python ({python}); use another one: make setup PYTHON=python3.12",
    ),
    (r"ResolutionImpossible", "constraints.txt pins releases that do not go together: {error}"),
    (r"(Permission denied|Read-only file system)[^\n]*", "{0}: .venv must be a folder that you can write"),
]
"""What pip prints, and what it means. A missing network is looked for first: pip then says that nothing fits."""
NO_NETWORK = r"NewConnectionError|ConnectTimeoutError|NameResolutionError|Temporary failure in name resolution"
MODEL = "from rooflab.engine.load.model_files import fetch; fetch()"


def release(parts):
    return ".".join(map(str, sys.version_info[:parts]))


def stop(sentence):
    sys.exit("setup: " + sentence)


def meaning(text):
    """The cause of pip's failure, and the way out."""
    errors = re.findall(r"^ERROR: (.*)", text, re.MULTILINE) or text.strip().splitlines()[-1:] or ["pip failed"]
    if re.search(NO_NETWORK, text):
        return "the package index cannot be reached; set-up needs a network, or a mirror that pip knows (PIP_INDEX_URL)"
    for pattern, sentence in CAUSES:
        found = re.search(pattern, text)
        if found:
            return sentence.format(*found.groups() or [found.group()], error=errors[0], python=release(2))
    return errors[-1]


def run(step, command):
    """Runs a command with its output in the log."""
    print(step, flush=True)
    with open(LOG, "a+") as log:
        start = log.seek(0, os.SEEK_END)
        done = subprocess.call(command, stdout=log, stderr=subprocess.STDOUT)
        log.seek(start)
        if done:
            stop(meaning(log.read()) + " (" + LOG + ")")


def made_by_this_python():
    """Whether .venv is here, in the place and of the Python that it was made for."""
    try:
        with open(os.path.join(".venv", "pyvenv.cfg")) as file:
            text = file.read()
    except OSError:
        return False
    return os.path.abspath(".venv") + "\n" in text and "version = " + release(3) + "\n" in text


def main():
    if sys.version_info < LEAST:
        stop(
            "Python 3.11 or later is needed, and this is " + release(3) + "; name another: make setup PYTHON=python3.12"
        )
    clear = [] if made_by_this_python() else ["--clear"]
    venv = [sys.executable, "-m", "venv"] + clear + [".venv"]
    made = subprocess.run(venv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if made.returncode:
        if "ensurepip" in made.stdout or "No module named" in made.stdout:
            stop("this Python has no venv module; on Debian and Ubuntu: apt-get install python3-venv")
        stop(meaning(made.stdout))
    # torch first and by itself, so that its pinned build is taken and nothing later asks for another.
    run("setup 1 of 3: torch and triton, the largest part (minutes, once)", PIP + ["torch", "triton"])
    run("setup 2 of 3: the lab, and what its tests and servers need", PIP + ["-e", ".[dev]"])
    print("setup 3 of 3: the weights of SmolLM2-135M (100 MB, once)", flush=True)
    if subprocess.run([PYTHON, "-c", MODEL], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).returncode:
        print("setup: the weights cannot be downloaded now; the tests that need them will be skipped", flush=True)


if __name__ == "__main__":
    main()
