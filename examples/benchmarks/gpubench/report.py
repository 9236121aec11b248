"""Results as a dict -> Markdown: tables, and ratios beside their aims."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.report import spread

Results = Mapping[str, Any]


def markdown(results: Results) -> str:
    parts = [_heading(results), _aims_table(results), _ends(results), _tasks(results), _models(results)]
    parts += [_stages(results), _notes(results)]
    return "\n\n".join(part for part in parts if part) + "\n"


def ceilings(results: Results, config: str) -> dict[str, float]:
    """Images/s of each stage alone, for a config; only what was measured."""
    cores, batch = str(results["about"]["cores"]), config.split()[-1]
    found = {
        "network": results.get("model", {}).get(config, {}).get("model_file"),
        "copy": results.get("copies", {}).get(f"pinned {batch}", {}).get("images_per_s"),
        "decode": results.get("decoding", {}).get(cores),
    }
    return {name: rate for name, rate in found.items() if rate}


def limit(rates: Mapping[str, Sequence[float]]) -> str:
    """The plain loop with the higher median."""
    loops = [name for name in ("threads", "loader") if name in rates]
    return max(loops, key=lambda name: statistics.median(rates[name]))


def aims(results: Results) -> Iterator[tuple[str, float, str, float]]:
    """(what, measured, "at least" or "at most", aim) for all that was measured."""
    for config, found in results.get("end_to_end", {}).items():
        rates, least = found["rates"], ceilings(results, config)
        ours = statistics.median(rates["gpuml"])
        if least:
            name = min(least, key=lambda stage: least[stage])
            yield f"{config}: gpuml / {name} alone, the lowest ceiling", ours / least[name], "at least", 0.85
        name = limit(rates)
        paired = [our / their for our, their in zip(rates["gpuml"], rates[name], strict=True)]
        yield f"{config}: gpuml / {name}, the limit", statistics.median(paired), "at least", 0.9
    for config, found in results.get("two_tasks", {}).items():
        if config in results.get("end_to_end", {}):
            rates = results["end_to_end"][config]["rates"]
            ratio = statistics.median(found["rates"]) / statistics.median(rates[limit(rates)])
            yield f"{config}: two tasks, calls of an Arrow batch / the limit", ratio, "at least", 0.9
    for config, size in results.get("copied_bytes", {}).items():
        yield f"{config}: bytes copied to the GPU an image", size, "at most", 151_000
    for config, found in results.get("peaks", {}).items():
        few, *_, many = found.values()
        yield f"{config}: peak memory, {' / '.join(reversed(found))} images", many / few, "at most", 1.05
    for config, found in results.get("out_of_memory", {}).items():
        yield f"{config}: memory ran out and every row was served", float(_survived(found)), "at least", 1
        if _survived(found):
            yield f"{config}: outputs after that, relative difference", found["difference"], "at most", 0.01


def _survived(found: Results) -> bool:
    """Whether smaller passes were needed, and lost no row."""
    return bool(found["complete"] and found["batch_that_fitted"])


def _heading(results: Results) -> str:
    about = ", ".join(f"{name} {value}" for name, value in results["about"].items())
    dry = "**A dry run with a small network: no result.** It shows that the steps run.\n\n"
    return (
        f"# gpuml on {results['about']['device']}\n\n{dry if results['dry_run'] else ''}{about}.\n\n"
        f"500x375 JPEGs, {results['plan']['distinct']} different ones, resized and cropped to 224x224. Images/s are "
        f"medians of {results['plan']['rounds']} rounds (least to most); contenders take turns. The limit is the "
        f"faster of two plain PyTorch loops over the same model file, with gpuml's own decode. float32 is as torch has "
        f"it: TF32 in convolutions, not in matrix products."
    )


def _aims_table(results: Results) -> str:
    rows = []
    for what, value, side, aim in aims(results):
        met = value >= aim if side == "at least" else value <= aim
        said = "dry run" if results["dry_run"] else "yes" if met else "**no**"
        rows.append((what, f"{value:,.3f}", f"{side} {aim:,}", said))
    return _table("Aims", ("What", "Measured", "Aim", "Met"), rows)


def _ends(results: Results) -> str:
    rows = []
    for config, found in results.get("end_to_end", {}).items():
        rates = {name: f"{spread(rates):,.0f}" for name, rates in found["rates"].items()}
        labels = 100 * min(found["equal_labels"].values())
        shown = (rates.get(name, "failed") for name in ("gpuml", "gpuml_arrow", "threads", "loader"))
        rows.append((config, found["images"], *shown, f"{found['busy']:.2f}", f"{labels:.1f}"))
    columns = ("Config", "Images", "gpuml, one call", "gpuml, a call an Arrow batch", "Threads", "DataLoader")
    return _table("End to end, images/s", (*columns, "GPU busy, gpuml", "Equal labels, %"), rows)


def _tasks(results: Results) -> str:
    rows = [
        (config, found["tasks"], found["threads_each"], found["images_each"], f"{spread(found['rates']):,.0f}")
        for config, found in results.get("two_tasks", {}).items()
    ]
    columns = ("Config", "Tasks", "Threads each", "Images each", "Images/s together")
    return _table("Tasks that share the GPU, a call an Arrow batch", columns, rows)


def _models(results: Results) -> str:
    rows = [
        (config, f"{found['model_file']:,.0f}", f"{found['bfloat16_weights']:,.0f}" if len(found) > 1 else "")
        for config, found in results.get("model", {}).items()
    ]
    columns = ("Config", "Model file, images/s", "torchvision's module, bfloat16 weights, images/s")
    return _table("The network alone, from uint8 on the device", columns, rows)


def _stages(results: Results) -> str:
    decoding = [(f"decode and resize, {n} threads", f"{rate:,.0f}", "") for n, rate in _of(results, "decoding")]
    copies = [
        (f"copy to the GPU, {kind} rows", f"{found['images_per_s']:,.0f}", f"{found['gigabytes_per_s']:.1f}")
        for kind, found in _of(results, "copies")
    ]
    return _table("The other stages alone", ("Stage", "Images/s", "GB/s"), decoding + copies)


def _notes(results: Results) -> str:
    lines = [f"- {note}" for note in results["notes"]]
    for config, found in _of(results, "end_to_end"):
        if found["no_loader"]:
            lines.append(f"- {config}: no DataLoader, {found['no_loader']}")
    for config, found in _of(results, "out_of_memory"):
        lines.append(
            f"- {config}: allowed {found['bytes_allowed']:,} bytes, where a batch takes {found['bytes_of_a_batch']:,} "
            f"and a quarter {found['bytes_of_a_quarter']:,}: passes of {found['batch_that_fitted']} rows, "
            f"{'all rows served' if found['complete'] else '**rows lost**'}"
        )
    return "## Notes\n\n" + "\n".join(lines) if lines else ""


def _of(results: Results, name: str) -> list[tuple[str, Any]]:
    return list(results.get(name, {}).items())


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    if not rows:
        return ""
    lines = [columns, ["---"] * len(columns), *rows]
    return f"## {title}\n\n" + "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
