"""Reads the `.wandb` file of an offline run: its records, and what was logged."""

import json

from wandb.proto import wandb_internal_pb2

from launcher.diagnosis.reading.wandb_files import read_records


def records(path):
    for data in read_records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        yield record


def history(path):
    """The logged lines, without wandb's own keys."""
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            yield {key: value for key, value in items.items() if not key.startswith("_")}


def metric_steps(path):
    """Which metric is drawn over which: {pattern: axis}."""
    return {
        record.metric.glob_name or record.metric.name: record.metric.step_metric
        for record in records(path)
        if record.WhichOneof("record_type") == "metric"
    }


def run_record(path):
    return next(record.run for record in records(path) if record.WhichOneof("record_type") == "run")
