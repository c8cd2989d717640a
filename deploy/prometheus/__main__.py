"""`python -m deploy.prometheus`: prints docs/metrics.md."""

from deploy.prometheus.page import metrics_page

print(metrics_page(), end="")
