"""Write corpus.jsonl and train.parquet: python examples/multiturn/search_qa/prepare.py

The towns are invented: no model knows them, so there is nothing to do but search. Half of the questions name
the town; the others name its mayor, and the town has to be found first.
"""

import json
import random
from pathlib import Path

import datasets

HERE = Path(__file__).parent
TASK = "Answer with the fact alone. Search for it: the towns are not known to you."
STARTS = ["Alder", "Brack", "Cald", "Dun", "Eller", "Fenn", "Gris", "Hollow", "Iver", "Jun"]
ENDS = ["moor", "by", "stead", "wick", "ford", "holm"]
NAMES = ["Ida", "Otto", "Vera", "Emil", "Nora", "Hugo"]
FAMILIES = ["Brook", "Hale", "Stone", "Marsh", "Reed", "Thorn", "Wells", "Ash"]
RIVERS = ["Wenn", "Tarn", "Isk", "Loma", "Sarre"]
GOODS = ["glass", "honey", "rope", "bells", "salt", "paper"]
FACTS = {"river": "On which river is", "goods": "What is made in"}


def town(rng: random.Random, name: str, mayor: str) -> dict:
    return {"town": name, "mayor": mayor, "river": rng.choice(RIVERS), "goods": rng.choice(GOODS)}


def passages(town: dict) -> list[dict]:
    place = "{town} is a town on the {river}. It is known for its {goods}.".format(**town)
    person = "{mayor} is the mayor of {town}.".format(**town)
    return [{"title": town["town"], "text": place}, {"title": town["mayor"], "text": person}]


def row(index: int, town: dict, fact: str, hops: int) -> dict:
    place = town["town"] if hops == 1 else f"the town whose mayor is {town['mayor']}"
    prompt = [{"role": "system", "content": TASK}, {"role": "user", "content": f"{FACTS[fact]} {place}?"}]
    return {
        "data_source": "search_qa",
        "prompt": prompt,
        "ability": "search",
        "reward_model": {"style": "rule", "ground_truth": town[fact]},
        "extra_info": {"index": index, "hops": hops},
    }


if __name__ == "__main__":
    rng = random.Random(0)
    names = [start + end for start in STARTS for end in ENDS]
    mayors = [f"{name} {family}" for name in NAMES for family in FAMILIES]
    towns = [town(rng, *pair) for pair in zip(rng.sample(names, 48), rng.sample(mayors, 48), strict=True)]
    corpus = [passage for town in towns for passage in passages(town)]
    (HERE / "corpus.jsonl").write_text("".join(json.dumps(passage) + "\n" for passage in corpus))
    asked = [(town, fact, hops) for town in towns for fact in FACTS for hops in (1, 2)]
    rng.shuffle(asked)
    rows = [row(index, *question) for index, question in enumerate(asked)]
    datasets.Dataset.from_list(rows).to_parquet(HERE / "train.parquet")
