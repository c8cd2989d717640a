"""The FastAPI application."""

from importlib.metadata import version

from fastapi import FastAPI

from rollout_service.app import operator_routes, picture_routes, trainer_routes
from rollout_service.app.access import BodyLimit
from rollout_service.app.host import Host
from rollout_service.app.problems import add_problem_handlers
from rollout_service.dashboard import routes as dashboard_routes
from rollout_service.dashboard.login import Door


def build_app(host: Host) -> FastAPI:
    """All routes over one host. The interactive pages are off: they load scripts from elsewhere."""
    service = host.settings.service
    app = FastAPI(
        title="april-rollout",
        version=version("april-rollout"),
        docs_url=None,
        redoc_url=None,
        root_path=service.root_path,
    )
    app.state.host = host
    app.state.door = Door(service, host.settings.run.name)
    app.include_router(trainer_routes.router)
    app.include_router(operator_routes.router)
    app.include_router(picture_routes.router)
    app.include_router(operator_routes.metrics_router)
    app.include_router(operator_routes.probe_router)
    if service.dashboard:
        app.include_router(dashboard_routes.router)
    app.add_middleware(BodyLimit, max_bytes=service.max_body_bytes)
    add_problem_handlers(app)
    return app
