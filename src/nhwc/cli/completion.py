"""Scripts that complete `nhwc`'s words in a shell, made from the parser itself."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping

from .values import Names

Parsers = Mapping[str, argparse.ArgumentParser]

_BASH = """\
_nhwc() {
  local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} verb= word words=
  local cut=
  # Of --option=value bash makes three words, zsh one.
  case "$current" in
    --*=*) before=${current%%%%=*} cut=${current%%%%=*}= current=${current#*=};;
    =) current=;;
    *) if [ "$before" = "=" ]; then before=${COMP_WORDS[COMP_CWORD-2]}; fi;;
  esac
  for word in "${COMP_WORDS[@]:1:$((COMP_CWORD-1))}"; do
    case $word in %(verbs)s) verb=$word; break;; esac
  done
  case "$verb $before" in
%(values)s
  esac
  if [ -z "$words" ]; then
    case "$verb $current" in
%(options)s
      " "*) words="%(names)s";;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -P "$cut" -- "$current"))
}
complete -o default -F _nhwc nhwc"""

_BEHIND_COMMAS = (
    'cut=$cut${current%"${current##*,}"} current=${current##*,}; compopt -o nospace 2>/dev/null'
)

_ZSH = """\
autoload -U +X compinit && compinit
autoload -U +X bashcompinit && bashcompinit
"""


def completion(shell: str, parser: argparse.ArgumentParser, verbs: Parsers) -> str:
    """Return a script for `shell` that completes verbs, their options, and words for these."""
    if shell == "fish":
        return _fish(parser, verbs)
    return _ZSH * (shell == "zsh") + _bash(parser, verbs)


def _bash(parser: argparse.ArgumentParser, verbs: Parsers) -> str:
    values, options = [], []
    for name, one in {"": parser, **verbs}.items():
        known = " ".join(word for action in _options(one) for word in action.option_strings)
        options.append(f'      "{name} -"*) words="{known}";;')
        for action in _options(one):
            places = "|".join(f'"{name} {word}"' for word in action.option_strings)
            if action.choices:
                values.append(f'    {places}) words="{" ".join(action.choices)}";;')
            if isinstance(action.type, Names):
                values.append(f'    {places}) words="{" ".join(action.type)}"; {_BEHIND_COMMAS};;')
    return _BASH % {
        "verbs": "|".join(verbs),
        "names": " ".join(verbs),
        "values": "\n".join(values),
        "options": "\n".join(options),
    }


def _fish(parser: argparse.ArgumentParser, verbs: Parsers) -> str:
    lines = []
    for name, one in verbs.items():
        about = shlex.quote(one.description or "")
        lines.append(f"complete -c nhwc -f -n __fish_use_subcommand -a {name} -d {about}")
    for name, one in {"": parser, **verbs}.items():
        place = f"'__fish_seen_subcommand_from {name}'" if name else "__fish_use_subcommand"
        for action in _options(one):
            words = [f"complete -c nhwc -n {place}"]
            for option in action.option_strings:
                words.append(f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}")
            if action.choices:
                words.append(f"-x -a '{' '.join(action.choices)}'")
            elif isinstance(action.type, Names):
                words.append(f"-x -a '(__fish_append , {' '.join(action.type)})'")
            elif action.nargs != 0:
                words.append("-r")
            lines.append(" ".join([*words, "-d", shlex.quote(action.help or "")]))
    return "\n".join(lines)


def _options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.option_strings]
