"""The model card of an export: what a user of the network needs to know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tbbn.bench.engine.record import Record

_METRICS = {"final_accuracy": "final accuracy", "average_accuracy": "average accuracy", "forgetting": "forgetting"}
_LISTED = 200  # classes in the table; model.json has all


def model_card(
    record: Record,
    about: Mapping[str, Any],
    checked: Sequence[str],
    not_checked: Sequence[str],
    sums: Mapping[str, str],
) -> str:
    """README.md in Markdown, with the header that model hubs read."""
    config, n_tasks, sizes = record.run_config, about["tasks"], about["task_sizes"]
    channels, height, width = about["shape"]
    norm = "plain batch norm in these files" if about["plain_batch_norm"] else "kept: it is not batch norm in eval mode"
    rows = record.accuracy[n_tasks - 1]
    accuracy = " | ".join(f"{100 * value:.1f}" for value in rows)
    known = [
        f"| {text} | {100 * record.metrics[key]:.2f} % |" for key, text in _METRICS.items() if key in record.metrics
    ]
    whole = n_tasks == len(record.accuracy)
    task_of = [t for t, size in enumerate(sizes, 1) for _ in range(size)]
    classes = [f"| {i} | {_cell(name)} | {task_of[i]} |" for i, name in enumerate(about["classes"][:_LISTED])]
    more = f"\n{len(about['classes']) - _LISTED} more: model.json.\n" if len(about["classes"]) > _LISTED else ""
    crop = f"the centre of {about['crop']}x{about['crop']} pixels, " if about["crop"] else ""
    mean, std = (", ".join(f"{value:.4g}" for value in about[key]) for key in ("mean", "std"))
    lines = [
        "---",
        "library_name: tbbn",
        "pipeline_tag: image-classification",
        f"tags: [class-incremental-learning, {config.method.name}, {config.norm.name}]",
        "---",
        "",
        f"# {config.backbone} on {config.data.name}, {config.label}, seed {config.seed}",
        "",
        f"An image classifier for {len(about['classes'])} classes, learnt in {n_tasks} tasks one after the other "
        f"({', '.join(map(str, sizes))} classes) with at most {config.memory.budget} stored exemplars"
        f"{' per class' if config.memory.per_class else ''}.",
        "",
        "| | |",
        "|---|---|",
        f"| data | {_cell(config.data.name)} |",
        f"| method | {_cell(str(config.method))} |",
        f"| norm in training | {_cell(str(config.norm))}; {norm} |",
        f"| network | {_cell(config.backbone)}, input {channels}x{height}x{width} |",
        f"| trained with | tbbn {record.environment.get('tbbn', '?')}, torch {record.environment.get('torch', '?')}, "
        f"protocol {config.protocol}, seed {config.seed} |",
        "",
        "## Use",
        "",
        f"`model.onnx` takes `images`: float32 (N, {channels}, {height}, {width}), values in [0, 1]"
        f"{', RGB' if channels == 3 else ''}. It gives `scores` (N, {len(about['classes'])}); the largest is the prediction.",
        f"Preprocessing: {crop}pixels divided by 255. Normalisation (mean {mean}; std {std}) is inside the file.",
        "",
        "```python",
        "import json, onnxruntime",
        'session = onnxruntime.InferenceSession("model.onnx")',
        'classes = json.load(open("model.json"))["classes"]',
        'scores = session.run(None, {"images": images})[0]',
        "names = [classes[i] for i in scores.argmax(1)]",
        "```",
        "",
        "`model.safetensors` holds the weights of the network; with tbbn installed:",
        "",
        "```python",
        "from tbbn.bench.interchange.export import load_export",
        'net = load_export(".")          # a torch module: net(images), uint8 or floats in [0, 1]',
        "names = net.predict(images)",
        "```",
        "",
        "## Accuracy",
        "",
        f"On the test images, in %, among all {len(about['classes'])} classes, after task {n_tasks}:",
        "",
        f"| {' | '.join(f'task {t}' for t in range(1, len(rows) + 1))} |",
        f"|{'---|' * len(rows)}",
        f"| {accuracy} |",
        "",
        *(["| over the whole run | |", "|---|---|", *known, ""] if whole else []),
        "## Classes",
        "",
        "In the order of the scores, which is the order of their arrival:",
        "",
        "| score | class | task |",
        "|---|---|---|",
        *classes,
        more,
        "## Checks",
        "",
        *(f"- {line}." for line in checked),
        *(f"- Not checked: {line}." for line in not_checked),
        *(f"- `{name}`: SHA-256 {value}" for name, value in sums.items()),
        "",
    ]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Text for a cell of a table: no bar and no line break of its own."""
    return "".join(sign if sign.isprintable() and sign != "|" else "_" for sign in text)
