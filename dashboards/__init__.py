"""Dashboards, recording rules and alerts for servers with sglang-ext, as code, with what checks and shows them."""
