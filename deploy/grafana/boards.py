"""All boards, and their files."""

import json
from collections.abc import Mapping
from pathlib import Path

from deploy.grafana.data import BUFFER, OFF_POLICY, TRAINER
from deploy.grafana.generation import ENGINE, LONG_TAIL
from deploy.grafana.model import Board, dashboard
from deploy.grafana.overview import OVERVIEW

BOARDS: tuple[Board, ...] = (OVERVIEW, LONG_TAIL, OFF_POLICY, BUFFER, ENGINE, TRAINER)
FOLDER = Path(__file__).parent / "boards"


def board_files() -> Mapping[str, str]:
    """Name and text of each file."""
    return {
        f"{board.uid.removeprefix('april-')}.json": json.dumps(dashboard(board, BOARDS), indent=2) + "\n"
        for board in BOARDS
    }
