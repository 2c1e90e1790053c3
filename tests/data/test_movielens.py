from __future__ import annotations

import pytest

from jaxrec.data import DataError, movielens_movies, movielens_ratings, movielens_users

pytestmark = pytest.mark.every_case

RATINGS = {
    "100K": ("u.data", "196\t242\t3\t881250949\n186\t302\t4\t891717742\n"),
    "1M": ("ratings.dat", "196::242::3::881250949\n186::302::4::891717742\n"),
    "20M": ("ratings.csv", "userId,movieId,rating,timestamp\n196,242,3.0,881250949\n"
            "186,302,4.0,891717742\n"),
    "recbole": ("ml-100k.inter", "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
                "196\t242\t3\t881250949\n186\t302\t4\t891717742\n"),
    "another-order": ("x.inter", "item_id:token\ttimestamp:float\tuser_id:token\trating:float\n"
                      "242\t881250949\t196\t3\n302\t891717742\t186\t4\n"),
    "more-columns": ("ratings.csv", '\ufeff"timestamp","rating","movieId","tag","userId"\r\n'
                     "881250949,3,242,a,196\r\n891717742,4,302,b,186\r\n"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "text"), RATINGS.values(), ids=RATINGS)
def test_ratings(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    for path in (tmp_path, tmp_path / name):
        assert movielens_ratings(path).to_pydict() == {
            "user_id": [196, 186],
            "movie_id": [242, 302],
            "rating": [3.0, 4.0],
            "timestamp": [881250949, 891717742],
        }


def test_half_stars(tmp_path):
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,2,3.5,1147880044\n")
    assert movielens_ratings(tmp_path)["rating"].to_pylist() == [3.5]


def test_films_of_100k(tmp_path):
    flags = "|".join("1" if i in (3, 4, 5) else "0" for i in range(19))
    line = f"543|Misérables, Les (1995)|01-Jan-1995||http://us.imdb.com/M/{{x}}|{flags}\n"
    (tmp_path / "u.item").write_bytes(line.encode("latin-1"))
    assert movielens_movies(tmp_path).to_pylist() == [
        {
            "movie_id": 543,
            "title": "Misérables, Les (1995)",
            "genres": ["Animation", "Children's", "Comedy"],
            "year": 1995,
        }
    ]


def test_films_of_1m(tmp_path):
    lines = (
        "260::Star Wars: Episode IV - A New Hope (1977)::Action|Sci-Fi\n73::Misérables (1995)::War"
    )
    (tmp_path / "movies.dat").write_bytes(lines.encode("latin-1"))
    films = movielens_movies(tmp_path)
    assert films["title"].to_pylist() == [
        "Star Wars: Episode IV - A New Hope (1977)",
        "Misérables (1995)",
    ]
    assert films["genres"].to_pylist() == [["Action", "Sci-Fi"], ["War"]]
    assert films["year"].to_pylist() == [1977, 1995]


def test_films_of_20m(tmp_path):
    (tmp_path / "movies.csv").write_text(
        'movieId,title,genres\n11,"American President, The (1995)",Comedy|Drama\n'
        "12,Blade Runner 2049,(no genres listed)\n",
        encoding="utf-8",
    )
    films = movielens_movies(tmp_path)
    assert films["title"].to_pylist() == ["American President, The (1995)", "Blade Runner 2049"]
    assert films["genres"].to_pylist() == [["Comedy", "Drama"], []]
    assert films["year"].to_pylist() == [1995, None]


def test_films_of_another_order(tmp_path):
    (tmp_path / "movies.csv").write_text("genres,title,movieId\nDrama,A (1995),7\n")
    assert movielens_movies(tmp_path).to_pylist() == [
        {"movie_id": 7, "title": "A (1995)", "genres": ["Drama"], "year": 1995}
    ]


def test_films_of_recbole(tmp_path):
    (tmp_path / "ml-100k.item").write_text(
        "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
        '1\tThe "Toy" Story\t1995\tAnimation Children\'s\n267\tunkonwn\tunkonwn\t\n'
    )
    assert movielens_movies(tmp_path).to_pylist() == [
        {
            "movie_id": 1,
            "title": 'The "Toy" Story',
            "genres": ["Animation", "Children's"],
            "year": 1995,
        },
        {"movie_id": 267, "title": "unkonwn", "genres": [], "year": None},
    ]


_USER_HEADER = "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("u.user", "1|24|M|10|85711\n"),
        ("users.dat", "1::M::24::10::85711\n"),
        ("ml-100k.user", _USER_HEADER + "1\t24\tM\t10\t85711\n"),
        (
            "x.user",
            "zip_code:token\tuser_id:token\tgender:token\tage:token\toccupation:token\n"
            "85711\t1\tM\t24\t10\n",
        ),
    ],
    ids=["100K", "1M", "recbole", "another-order"],
)
def test_people(tmp_path, name, line):
    (tmp_path / name).write_text(line)
    assert movielens_users(tmp_path).to_pylist() == [
        {"user_id": 1, "age": 24, "gender": "M", "occupation": "10", "zip_code": "85711"}
    ]


BAD = {
    "columns": ("u.data", "1\t2\t3\n", "Expected 4 columns, got 3"),
    "number": ("u.data", "1\t2\t3\t4\nx\t2\t3\t4\n", "invalid value 'x'"),
    "missing": ("ratings.csv", "userId,movieId,rating,timestamp\n1,2,3,4\n1,,3,4\n",
                "line 3: movie_id is missing"),
    "no-header": ("ratings.csv", "1,2,3,4\n1,2,3,4\n", "line 1: the header '1,2,3,4' names no "),
    "other-names": ("x.inter", "user\titem\trating\ttimestamp\n1\t2\t3\t4\n",
                    "names no columns user_id or userId"),
    "twice": ("ratings.csv", "userId,user_id,movieId,rating,timestamp\n1,2,3,4,5\n",
              "names 2 columns user_id or userId"),
    "another": ("readme.txt", "", "no ratings of MovieLens"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "text", "message"), BAD.values(), ids=BAD)
def test_ratings_that_are_none(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        movielens_ratings(tmp_path)


def test_what_is_not_there(tmp_path):
    for read in (movielens_ratings, movielens_movies, movielens_users):
        with pytest.raises(FileNotFoundError, match=r"No such file or directory: .*missing"):
            read(tmp_path / "missing")
    for read in (movielens_movies, movielens_users):
        with pytest.raises(DataError, match="here"):
            read(tmp_path)
    (tmp_path / "movies.dat").write_text("1::a::b\n2::a\n")
    with pytest.raises(DataError, match="line 2: expected id::title::genres, got '2::a'"):
        movielens_movies(tmp_path)
