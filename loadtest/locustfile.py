"""Plain Locust: ``locust -f loadtest/locustfile.py --host http://127.0.0.1:30000 --ladder 1,2,4``."""

from sglang_ext_loadtest.locustfile import Ladder, TokenUser

__all__ = ["Ladder", "TokenUser"]
