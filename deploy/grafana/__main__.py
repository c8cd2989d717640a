"""`python -m deploy.grafana`: writes the boards to deploy/grafana/boards."""

from deploy.grafana.boards import FOLDER, board_files

FOLDER.mkdir(exist_ok=True)
for name, text in board_files().items():
    (FOLDER / name).write_text(text)
    print(FOLDER / name)
