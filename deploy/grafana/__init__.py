"""Grafana: the provisioned data source and boards. The boards are made by `python -m deploy.grafana`."""
