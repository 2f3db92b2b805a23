"""Runs git for tests: commits by one author, without the configuration of the machine."""

import os
import subprocess

from needs import skip_without

IDENTITY = {"GIT_AUTHOR_NAME": "A", "GIT_AUTHOR_EMAIL": "a@b.c", "GIT_COMMITTER_NAME": "A"}
IDENTITY |= {"GIT_COMMITTER_EMAIL": "a@b.c", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}


def git(root, *arguments):
    """What git says in the checkout `root`."""
    skip_without("git")
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, env=os.environ | IDENTITY, check=True, capture_output=True, text=True).stdout.strip()
