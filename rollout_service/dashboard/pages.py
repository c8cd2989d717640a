"""HTML from templates, and the headers that every page carries."""

from collections.abc import Mapping
from functools import cache

from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader, StrictUndefined

from rollout_service.dashboard.assets import digest

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@cache
def templates() -> Environment:
    """The templates; what they show is escaped, and a name that they lack is an error."""
    return Environment(
        loader=PackageLoader("rollout_service.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def page(name: str, root: str, shown: Mapping[str, object], status_code: int = 200) -> HTMLResponse:
    """The page of a template. `root`: from its address to that of the service, so that any prefix may come before."""
    html = templates().get_template(name).render(root=root, static=f"{root}/dashboard/static/{digest()}", **shown)
    return HTMLResponse(html, status_code, headers=HEADERS)
