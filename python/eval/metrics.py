"""Scores of a model's output against reference answers, each between 0 and 1; of several references the best counts.

Words are lower case without punctuation and English articles, as question answering is usually scored (SQuAD, LongBench);
characters of scripts without spaces count as words of their own.
"""
import re
import string
from collections import Counter

_PUNCTUATION = str.maketrans("", "", string.punctuation + "。，、；：？！“”‘’（）《》【】…—")
_WORD = re.compile("[\u2e80-\U0010ffff]|[^\\s\u2e80-\U0010ffff]+")


def words(text):
    return [word for word in _WORD.findall(text.lower().translate(_PUNCTUATION)) if word not in ("a", "an", "the")]


def _f1(output, answer):
    a, b = words(output), words(answer)
    common = sum((Counter(a) & Counter(b)).values())
    return 2 * common / (len(a) + len(b)) if common else float(a == b)


def longest_common(a, b):
    row = [0] * (len(b) + 1)
    for x in a:
        diagonal = 0
        for j, y in enumerate(b):
            above = row[j + 1]
            row[j + 1] = diagonal + 1 if x == y else max(above, row[j])
            diagonal = above
    return row[-1]


def _rouge_l(output, answer):
    a, b = words(output), words(answer)
    return 2 * longest_common(a, b) / (len(a) + len(b)) if a or b else 1.0


def _best(score):
    return lambda output, answers: max(score(output, answer) for answer in answers)


def _contained(output, answers):
    return [float(answer.lower() in output.lower()) for answer in answers]


METRICS = {
    "f1": _best(_f1),
    "rouge_l": _best(_rouge_l),
    "exact": _best(lambda output, answer: float(words(output) == words(answer))),
    "contains": lambda output, answers: sum(_contained(output, answers)) / len(answers),  # the share of them (RULER's needles)
    "contains_any": lambda output, answers: max(_contained(output, answers)),             # RULER's questions
}

# LongBench's data sets that are not scored by F1
LONGBENCH = {
    **dict.fromkeys(["gov_report", "qmsum", "multi_news", "vcsum", "samsum", "dureader"], "rouge_l"),
    **dict.fromkeys(["trec", "lsht", "passage_retrieval_en", "passage_retrieval_zh", "passage_count"], "contains_any"),
}
