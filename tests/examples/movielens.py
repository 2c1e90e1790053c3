"""Generated files in the layout of the MovieLens files that `deepfm_movielens.py` reads."""

from __future__ import annotations

import pathlib

import numpy as np

GENRES = ("Action", "Comedy", "Drama", "Thriller")


def write(path: pathlib.Path, users: int = 40, films: int = 60, ratings: int = 2000) -> None:
    """``path`` with endings .inter, .item and .user; users like one or two genres."""
    rng = np.random.default_rng(0)
    genres = [sorted({*rng.integers(0, 4, rng.integers(1, 3)).tolist()}) for _ in range(films)]
    tastes = rng.integers(0, 4, users)
    lines = {
        "item": ["item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq"],
        "user": ["user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token"],
        "inter": ["user_id:token\titem_id:token\trating:float\ttimestamp:float"],
    }
    for film, found in enumerate(genres):
        names = " ".join(GENRES[genre] for genre in found)
        lines["item"].append(f'{film + 1}\tThe "{film}"\t{1950 + film % 50}\t{names}')
    for user in range(users):
        lines["user"].append(f"{user + 1}\t{20 + user}\t{'MF'[user % 2]}\tother\t12345")
    for time in range(ratings):
        user, film = int(rng.integers(users)), int(rng.integers(films))
        liked = (tastes[user] in genres[film]) == (rng.random() < 0.9)
        lines["inter"].append(f"{user + 1}\t{film + 1}\t{5 if liked else 2}\t{time}")
    for ending, rows in lines.items():
        path.with_suffix(f".{ending}").write_text("\n".join(rows) + "\n", encoding="utf-8")
