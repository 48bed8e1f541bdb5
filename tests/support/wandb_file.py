"""Reads the `.wandb` file of an offline run: the log format of LevelDB, with records of wandb's own protobuf."""

import json
import struct

from wandb.proto import wandb_internal_pb2

BLOCK = 32 * 1024
FILE_HEADER = 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(path):
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    position, parts = FILE_HEADER, b""
    while position + 7 <= len(data):
        room = BLOCK - position % BLOCK
        if room < 7:
            position += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


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
