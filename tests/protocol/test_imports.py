"""The protocol loads without the heavy stack, and the import arrows of the design hold."""

import subprocess
import sys

BLOCKED = ("torch", "vllm", "ray", "redis", "deepspeed", "transformers", "fastapi")

SCRIPT = f"""
import importlib, pkgutil, sys
for name in {BLOCKED!r}:
    sys.modules[name] = None  # an import of it fails
import protocol
for module in pkgutil.walk_packages(protocol.__path__, "protocol."):
    importlib.import_module(module.name)
print("loaded", len([m for m in sys.modules if m.startswith("protocol")]))
"""


def test_protocol_imports_none_of_the_heavy_stack():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) > 10


def test_import_arrows_hold():
    script = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert " 0 broken" in done.stdout
