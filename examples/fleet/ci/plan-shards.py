#!/usr/bin/env python3
"""Makes two jobs, each of which checks a part of the hosts."""
import json
import os

jobs = [{"name": f"check-{shard}", "checkout": False, "run": f"echo check part {shard} of 2"} for shard in (1, 2)]
with open(os.environ["KICI_JOBS"], "w", encoding="utf-8") as file:
    json.dump({"jobs": jobs}, file)
