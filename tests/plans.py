"""What Spark's physical plan says of the Python UDFs in it: how many nodes, and how many rows they were given."""


def udf_nodes(frame):
    """ArrowEvalPython nodes of a classic DataFrame's plan, those under adaptive stages included."""
    found, waiting = [], [frame._jdf.queryExecution().executedPlan()]
    while waiting:
        node = waiting.pop()
        name = node.getClass().getSimpleName()
        if name == "AdaptiveSparkPlanExec":
            waiting.append(node.executedPlan())
        elif name.endswith("QueryStageExec"):
            waiting.append(node.plan())
        elif name == "InMemoryTableScanExec":
            waiting.append(node.relation().cachedPlan())
        elif name == "ArrowEvalPythonExec":
            found.append(node)
        children = node.children()
        waiting += [children.apply(i) for i in range(children.size())]
    return found


def udf_rows(frame):
    """Collects the frame; the number of rows that Python UDFs gave back for it."""
    frame.collect()
    return sum(node.metrics().apply("pythonNumRowsReceived").value() for node in udf_nodes(frame))
