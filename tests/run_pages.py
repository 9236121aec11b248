"""Python of pages, a JSON line each on stdin -> a JSON line each: its traceback, or null. One process, so one JVM.

Each page has its own namespace and, in the Spark that runs, its own session: settings, views and functions are not
the next page's. A page may stop Spark; the next then starts it.
"""

import json
import os
import sys
import traceback

from pyspark.sql import SparkSession


def run(code, name):
    """The traceback of a page, with the lines of the page itself; None if it ran."""
    environment, path = dict(os.environ), list(sys.path)
    try:
        # As __main__, whose functions travel by value, as those of a script do.
        exec(compile(code, name, "exec"), {"__name__": "__main__"})
    except BaseException:  # a page that exits is a failed page
        return traceback.format_exc()
    finally:
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = path
        running = SparkSession.getActiveSession()
        if running is not None:
            SparkSession._instantiatedSession = None  # what getOrCreate would give the next page
            running.newSession()
    return None


def main():
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what pages print is no answer
    for line in sys.stdin:
        page = json.loads(line)
        answers.write(json.dumps(run(page["code"], page["name"])) + "\n")


main()
