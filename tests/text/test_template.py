"""Cutting chat templates: what can be cut is exact, what cannot is refused at start."""

from __future__ import annotations

import pytest

from zl.errors import ModelError
from zl.text.template import ChatTemplate, Hole, TemplateRefusalError, fill

LOOP = "{% for m in messages %}<{{ m['role'] }}>BODY{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def template(body, **special):
    return ChatTemplate(LOOP.replace("BODY", body), special)


def cut_and_check(made):
    cuts = {(n, system): made.cut(n, system) for n in (1, 3) for system in (False, True)}
    made.check(cuts)
    return cuts


def test_cut_gives_constants_and_holes():
    pieces = template("{{ m['content'] }}").cut(1, True)
    assert pieces == ("<system>", Hole(0, False, False), "<user>", Hole(1, False, False), "<assistant>")


@pytest.mark.parametrize(
    ("body", "left", "right"),
    [
        ("{{ m.content | trim }}", True, True),
        ("{{ m['content'].strip() }}", True, True),
        ("{{ m.content.rstrip() }}", False, True),
        ("{{ m.content.lstrip() }}", True, False),
        ("{{ ('# ' + m.content) | trim }}", False, True),
    ],
)
def test_stripping_is_seen(body, left, right):
    made = template(body)
    cuts = cut_and_check(made)
    assert [p for p in cuts[1, False] if isinstance(p, Hole)] == [Hole(1, left, right)]
    assert made.blank_matters
    for content in (" x ", "\n\tx y\n"):
        assert fill(cuts[1, False], [None, content]) == made.render([None, content])


@pytest.mark.parametrize(
    "body",
    [
        "{{ m.content | upper }}",
        "{{ m.content | e }}",
        "{{ m.content | tojson }}",
        "{{ m.content.replace('\\n', ' ') }}",
        "{{ m.content | replace('x', 'y') }}",
        "{{ m.content[:20] }}",
        "{{ m.content.strip('\\n') }}",
        "{{ m.content.lstrip(' ') }}",
        "{{ m.content.split() | join(' ') }}",
        "{{ m.content if m.content | length < 1000 else 'long' }}",
        "{{ m.content if not m.content.startswith(' ') else 'blank' }}",
        "{% if m.role != 'assistant' %}{{ m.content }}{% else %}-{% endif %}",
        "{{ 'twelve' if m.content == '12' else m.content }}",
    ],
)
def test_what_changes_contents_is_refused_at_start(body):
    with pytest.raises(ModelError, match="chat template"):
        cut_and_check(template(body))


def test_strings_with_a_meaning_of_their_own_are_learnt_by_role():
    made = template("{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}")
    cut_and_check(made)
    assert [set(needles) for needles in made.needles] == [set(), set(), {"</think>"}]


def test_blank_contents_that_change_the_text_around_are_noticed():
    made = template("{% if m.content %}[{{ m.content }}]{% endif %}")
    cut_and_check(made)
    assert made.blank_matters
    assert made.cut(1, False, {1: ""}) == ("<user><assistant>",)
    plain = template("{{ m.content }}")
    cut_and_check(plain)
    assert not plain.blank_matters


def test_refusals_are_the_templates_own_words():
    made = template("{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}{{ m.content }}")
    made.cut(1, False)
    with pytest.raises(TemplateRefusalError, match="no system here"):
        made.cut(1, True)


def test_dropped_system_prompt_is_a_refusal():
    with pytest.raises(TemplateRefusalError, match="no place"):
        template("{% if m.role != 'system' %}{{ m.content }}{% endif %}").cut(1, True)


def test_todays_date_is_refused_unless_the_template_has_another():
    with pytest.raises(ModelError, match="date"):
        template("{{ strftime_now('%d') }}{{ m.content }}").cut(1, False)
    body = "{% if strftime_now is defined %}{{ strftime_now('%d') }}{% else %}26 Jul{% endif %}{{ m.content }}"
    assert template(body).cut(1, False)[0] == "<user>26 Jul"


def test_generation_marks_loop_controls_and_named_tokens_work():
    body = "{% if loop.index > 99 %}{% break %}{% endif %}{% generation %}{{ m.content }}{% endgeneration %}"
    body += "{{ eos_token }}"
    assert template(body, eos_token="</s>").cut(1, False)[-1] == "</s><assistant>"


def test_sandbox_holds():
    with pytest.raises(TemplateRefusalError, match=r"unsafe|undefined"):
        template("{{ m.content.__class__.__mro__ }}{{ m.content }}").cut(1, False)
    with pytest.raises(TemplateRefusalError, match=r"unsafe|not safely"):
        template("{{ messages.append(1) }}{{ m.content }}").cut(1, False)


def test_broken_template_is_named():
    with pytest.raises(ModelError, match="compile"):
        ChatTemplate("{% for %}", {})
