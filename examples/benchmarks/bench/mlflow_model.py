"""A data frame of encoded images -> a data frame of predictions, as a pyfunc model of mlflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from mlflow.pyfunc import PythonModel

#: Rows in a forward pass, the same for all peers.
BATCH = 64


class Classifier(PythonModel):
    """Decodes, preprocesses and scores; the weights are an artifact."""

    def __init__(self, name: str) -> None:
        self.name = name

    def load_context(self, context: Any) -> None:
        from bench.workloads import scorer

        weights = context.artifacts.get("weights", "") if context.artifacts else ""
        self.score = scorer(self.name, Path(weights).parent)

    # mlflow reads the hints of the rows as a schema, and warns of one that is none.
    def predict(self, context, model_input, params=None) -> pd.DataFrame:
        rows = model_input.iloc[:, 0].tolist()
        parts = [self.score(rows[start : start + BATCH]) for start in range(0, len(rows), BATCH)]
        return pd.DataFrame(
            {
                "prediction": [label for part in parts for label in part["prediction"]],
                "probability": [row for part in parts for row in part["probability"]],
            }
        )
