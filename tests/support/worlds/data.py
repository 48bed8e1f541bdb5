"""Records, the files that hold them, and the queue of their prompts."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.data.dataset import load_records
from actors.data.prompt_queue import PromptQueue
from launcher.base.errors import DataError
from launcher.config.schema import DatasetConfig

RECORDS = [{"question": f"{i}+1?", "answer": f"{i}+1={i + 1}\n#### {i + 1}", "level": i} for i in range(5)]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write(path, records=RECORDS):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(records))
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def load(path, **changes):
    return load_records(DatasetConfig(path=str(path), **changes), key="train_dataset")


def refused(path, **changes):
    with pytest.raises(DataError) as error:
        load(path, **changes)
    return str(error.value)


def questions(records):
    return [record.question for record in records]


IDS = [f"p{i}" for i in range(10)]


def queue(ids=IDS, seed=1, shuffle=True):
    return PromptQueue(ids, seed=seed, shuffle=shuffle)


def restored(prompts, **changes):
    order = prompts.prompt_order
    other = queue(order.ids, **{"seed": order.seed, "shuffle": order.shuffle} | changes)
    other.load_state_dict(json.loads(json.dumps(prompts.state_dict())))
    return other


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
