"""The page's scripts and styles: served under the digest of all of them, or put into one file for the report.

Always true: the files are read once; their address changes when any of them changes, so a browser may keep them for
ever; nothing outside this folder can be named.
"""

import base64
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

MEDIA_TYPES = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "txt": "text/plain"}
DIGEST_CHARS = 16  # 64 bits: enough to tell two builds apart
IMPORT = re.compile(r'^import \{[^}]*\} from "\./([a-z_/]+\.js)";\n', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(async )?(function|const|let|class)\b)", re.MULTILINE)
TOP_LEVEL = re.compile(r"^(?:export )?(?:async )?(?:function\*?|const|let|class) ([A-Za-z_]\w*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Asset:
    """One file as it is served."""

    content: bytes
    media_type: str

    @property
    def text(self) -> str:
        """The content, which is UTF-8."""
        return self.content.decode()


@cache
def assets() -> dict[str, Asset]:
    """Every file of `static`, by its path there."""
    return dict(sorted(_walk(files("rollout_service.dashboard") / "static", "")))


@cache
def digest() -> str:
    """Of all files; part of their address."""
    hashed = hashlib.sha256()
    for name, asset in assets().items():
        hashed.update(f"{name}:{len(asset.content)}:".encode() + asset.content)
    return hashed.hexdigest()[:DIGEST_CHARS]


def bundle(entry: str) -> str:
    """The module `entry` and all that it imports as one script, what is imported first.

    The modules keep to one form of import and to names that differ, which makes joining them this simple.
    """
    order: list[str] = []
    _visit(entry, order)
    owners: dict[str, str] = {}
    for name in order:
        for top_level in TOP_LEVEL.findall(assets()[name].text):
            assert owners.setdefault(top_level, name) == name, f"{top_level} is in {owners[top_level]} and {name}"
    return "\n".join(EXPORT.sub("", IMPORT.sub("", assets()[name].text)) for name in order)


def content_hash(text: str) -> str:
    """How a content-security policy names an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _visit(name: str, order: list[str]) -> None:
    for imported in IMPORT.findall(assets()[name].text):
        if imported not in order:
            _visit(imported, order)
    order.append(name)


def _walk(folder: Traversable, prefix: str) -> list[tuple[str, Asset]]:
    found: list[tuple[str, Asset]] = []
    for entry in folder.iterdir():
        name = f"{prefix}{entry.name}"
        media_type = MEDIA_TYPES.get(name.rpartition(".")[2])
        if entry.is_dir():
            found += _walk(entry, f"{name}/")
        elif media_type:
            found.append((name, Asset(entry.read_bytes(), media_type)))
    return found
