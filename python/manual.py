"""Makes a manual page and shell completion of a program from what its --help prints.

    python3 python/manual.py deeptutor-bench build/bin/deeptutor-bench FOLDER

writes FOLDER/man/deeptutor-bench.1, FOLDER/bash/deeptutor-bench and FOLDER/zsh/_deeptutor-bench. The build does that each time a
program was linked (cmake/dt_manual.cmake). Flags and their explanations come from --help alone; what is written here is what no
flag says: what the program is for, examples, exit codes.
"""
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
COMMANDS = ("kld", "needle", "calibrate", "long", "ab")  # of deeptutor-eval
USUAL_EXIT = [("0", "Done."), ("1", "The run failed, or the model can't be opened."), ("2", "Bad usage.")]

PROGRAMS = {
    "deeptutor": dict(
        title="run a language model on a text or in a chat, with layer-wise eviction of its KV cache",
        text="""Reads a prompt, or chats, and writes what the model generates to standard output, and nothing else there. Log, progress
and timings go to standard error. With --cache-eviction every layer keeps only as many tokens as its budget allows, so that a long
context neither fills the memory nor slows decoding down. Ctrl-C ends generation, prints the timings and saves the session; a second
one quits.""",
        examples=[("Go on from a long text, deterministically", "deeptutor -m model.gguf -f long.txt -n 256 --temp 0 --cache-eviction"),
                  ("Chat, and keep the conversation for the next time",
                   "deeptutor -m model.gguf -cnv --cache-eviction --session chat.session")],
        exits=[("0", "Done, also after Ctrl-C or when the reader of the output is gone.")] + USUAL_EXIT[1:]),
    "deeptutor-bench": dict(
        title="measure a model's speed by depth of the context",
        text="""For every depth, with eviction off and, with --cache-eviction, on: reading the whole prompt up to there, reading
more on top of it, and decoding. Rows hold the median of the repeats and how far apart they lie, the size of the KV cache, and the bound that
the machine's memory sets to decoding.""",
        examples=[("", "deeptutor-bench -m model.gguf -d 0,4096,8192 --cache-eviction")], exits=USUAL_EXIT),
    "deeptutor-eval": dict(
        title="measure what eviction costs in quality",
        text="""kld tells how far next-token distributions after eviction are from those of the full cache. needle hides facts in
a text and asks for them. calibrate measures what each KV head needs and writes an eviction config. long compares the perplexity of
a text far beyond the context with that within it. ab answers the same prompts with eviction off and on, and passes or fails them by
your thresholds.""",
        examples=[("Of a text of 17,412 tokens or more", "deeptutor-eval kld -m model.gguf -f text.txt --kept 0.5,0.25"),
                  ("", "deeptutor-eval ab -m model.gguf -i prompts.jsonl --eviction-preset docqa --min-rouge 0.8")],
        exits=USUAL_EXIT + [("3", "ab: a check failed.")]),
    "deeptutor-quantize": dict(
        title="write a quantized copy of a GGUF model",
        text="""Tensors that are quantized already stay as they are; a model of which nothing is left to quantize is
refused. The output is written under another name and renamed when it is whole.""",
        examples=[("", "deeptutor-quantize model-f16.gguf model.gguf Q4_K_M")], exits=USUAL_EXIT),
    "deeptutor-server": dict(
        title="serve a model by OpenAI's HTTP API, and as a web page",
        text="""Many clients are computed in one batch. A conversation that comes back finds its cache again, in memory or, with
--session-dir, on disk. SIGTERM or Ctrl-C lets running replies end within --grace seconds. The root path is a web page.""",
        examples=[("", "deeptutor-server -m model.gguf --cache-eviction --port 8080")], exits=USUAL_EXIT),
    "deeptutor-rpc-server": dict(
        title="lend this machine's devices to a program on another machine",
        text="""Layers that --device rpc=HOST:PORT names run here, their cache beside their weights. There is neither a password
nor encryption: for trusted networks only. It listens on this machine alone unless --host says otherwise.""",
        examples=[("", "deeptutor-rpc-server --host 192.168.1.2 --port 50052"),
                  ("", "deeptutor -m model.gguf -f long.txt --device rpc=192.168.1.2:50052")], exits=USUAL_EXIT),
    "deeptutor-batch": dict(
        title="answer many prompts from a file or a folder",
        text="""Several prompts are computed at once, and each result is a line of the output as soon as it is there. The same
command goes on where one was stopped.""",
        examples=[("", "deeptutor-batch -m model.gguf -i jobs.jsonl -o results.jsonl"),
                  ("", "deeptutor-batch -m model.gguf -i texts/ --each 'Summarize: {text}' -o results.jsonl")],
        exits=[("0", "Every row has its line, good or bad.")] + USUAL_EXIT[1:]),
}


def help_of(program, *words):
    result = subprocess.run([program, *words, "--help"], capture_output=True, text=True, timeout=60, check=True)
    return result.stdout


def parse(text):
    """usage lines, and groups [(title, [(names, value, explanation)])] in order."""
    usage, groups, at = [], [], "usage"
    for line in text.splitlines():
        flag = re.match(r"  (-[^\s,]+(?:, -[^\s,]+)*)(?: (\S+))?(?:  +(\S.*))?$", line)
        if line.startswith("usage: ") or (at == "usage" and re.match(r"       \S", line)):
            usage.append(line[7:])
        elif flag and groups:
            names, value, explanation = flag.groups()
            groups[-1][1].append([names.split(", "), value or "", explanation or ""])
        elif line.startswith("  ") and groups and groups[-1][1] and at == "flags":
            option = groups[-1][1][-1]
            if option[1].endswith("|"):  # a list of choices that goes on here
                more, _, line = line.strip().partition(" ")
                option[1] += more
            option[2] = (option[2] + " " + line.strip()).strip()
        elif re.match(r"\S", line):
            groups.append((line.strip(), []))
        elif line.strip() and groups and not groups[-1][1]:
            groups[-1] = (groups[-1][0] + " " + line.strip(), [])
        at = "usage" if at == "usage" and usage and not groups else "flags"
    return usage, [group for group in groups if group[1]]


def types_of(name, program):
    """What the third word of deeptutor-quantize may be; of others none."""
    if name != "deeptutor-quantize":
        return []
    return subprocess.run([program, "--list"], capture_output=True, text=True, timeout=60, check=True).stdout.split()


def read_program(name, program):
    """Usage, groups, and where there are commands the options of each; deeptutor-eval's groups are those of its commands together."""
    (usage, groups), commands = parse(help_of(program)), {}
    for command in COMMANDS if name == "deeptutor-eval" else ():
        own = parse(help_of(program, command))[1]
        commands[command] = [option for _, options in own for option in options]
        for title, options in own:
            if title not in [known for known, _ in groups]:
                groups.append((title, options))
    if not groups:
        sys.exit(f"error: {program} --help lists no flags")
    short = os.path.basename(program)
    return [re.sub(rf"^\S*{re.escape(short)}(?=\s)", name, line) for line in usage], groups, commands


# ---- man ----

def roff(text):
    return re.sub(r"^(['.])", r"\\&\1", text.replace("\\", "\\e").replace("-", "\\-"), flags=re.M)


def in_lines(command):
    """An example where an indented block leaves room for 69 columns: broken before flags, as a shell takes it."""
    room, lines = 69, [""]
    for part in re.split(r" (?=-)", command):
        if lines[-1] and len(command) > room and len(lines[-1]) + len(part) > room - 3:
            lines.append("   ")
        lines[-1] += " " * bool(lines[-1]) + part
    return " \\\n".join(lines)


def man_page(name, usage, groups, types):
    about = PROGRAMS[name]
    version = re.search(r'#define DT_VERSION "(.*)"', (ROOT / "include/deeptutor.h").read_text()).group(1)
    out = [f".\\\" Made from {name} --help by python/manual.py.", f'.TH {name.upper()} 1 "" "DeepTutor {version}" "DeepTutor"',
           ".SH NAME", f"{roff(name)} \\- {roff(about['title'])}", ".SH SYNOPSIS"]
    for line in usage:
        first, _, rest = line.partition(" ")
        out += [f".B {roff(first)}", roff(rest), ".br"]
    out[-1:] = [".SH DESCRIPTION", roff(" ".join(about["text"].split())), ".SH OPTIONS"]
    for title, options in groups:
        out.append(f'.SS "{roff(title)}"')
        for names, value, explanation in options:
            names = ", ".join(f"\\fB{roff(flag)}\\fR" for flag in names)
            out += [".TP", names + (f" \\fI{roff(value)}\\fR".replace("|", "|\\:") if value else ""), roff(explanation)]
    if types:
        out += ['.SS "Types"', roff(", ".join(types))]
    out.append(".SH EXIT STATUS")
    for code, meaning in about["exits"]:
        out += [".TP", f".B {code}", roff(meaning)]
    out.append(".SH EXAMPLES")
    for i, (what, command) in enumerate(about["examples"]):
        out += [".PP"] * (i > 0) + ([roff(what) + ":"] if what else []) + [".RS 4", ".nf", roff(in_lines(command)), ".fi", ".RE"]
    others = [f".BR {roff(other)} (1)" for other in PROGRAMS if other != name]
    out += [".SH SEE ALSO"] + [other + "," for other in others[:-1]] + others[-1:]
    return "\n".join(out) + "\n"


# ---- completion ----

def choices(value):
    return value.split("|") if "|" in value else []


def bash_completion(name, groups, types, commands):
    """Empty replies become names of files: that is what the words F, S and NAME stand for, and numbers can't be guessed."""
    function = "_" + name.replace("-", "_")
    options = [option for _, options in groups for option in options]
    flags = " ".join(flag for names, _, _ in options for flag in names)
    lines = [f"# Made from {name} --help by python/manual.py.", f"{function}() {{", "    COMPREPLY=()",
             '    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}', "    case $before in"]
    for names, value, _ in options:
        if choices(value):
            lines += [f"    {' | '.join(names)})", f'        COMPREPLY=($(compgen -W "{" ".join(choices(value))}" -- "$word"))',
                      "        return", "        ;;"]
    valued = [flag for names, value, _ in options if value and not choices(value) for flag in names]
    lines += [f"    {' | '.join(valued)}) return ;;", "    esac"]
    if commands:
        lines += ["    if [ $COMP_CWORD = 1 ]; then", f'        COMPREPLY=($(compgen -W "{" ".join(commands)} --help --version" -- "$word"))',
                  "        return", "    fi"]
    if types:  # the third word that is neither a flag nor a flag's value
        lines += ["    local i words=0", "    for ((i = 1; i < COMP_CWORD; i++)); do", "        case ${COMP_WORDS[i]} in",
                  f"        {' | '.join(valued)}) i=$((i + 1)) ;;", "        -*) ;;", "        *) words=$((words + 1)) ;;", "        esac", "    done",
                  "    if [ $words = 2 ] && [ \"${word#-}\" = \"$word\" ]; then",
                  f'        COMPREPLY=($(compgen -W "{" ".join(types)}" -- "$word"))', "        return", "    fi"]
    lines.append(f'    local flags="{flags}"')
    if commands:
        own = {command: " ".join(flag for names, _, _ in options for flag in names) for command, options in commands.items()}
        lines += ["    case ${COMP_WORDS[1]} in", *(f'    {command}) flags="{own[command]}" ;;' for command in own), "    esac"]
    lines += ["    case $word in", '    -*) COMPREPLY=($(compgen -W "$flags" -- "$word")) ;;', "    esac", "}", f"complete -o default -F {function} {name}"]
    return "\n".join(lines) + "\n"


def zsh_specs(options):
    def quoted(text):
        return re.sub(r"([\\\[\]:])", r"\\\1", text).replace("'", "'\\''")

    specs = []
    for names, value, explanation in options:
        action = ""
        if value:
            action = f":{quoted(value.split('|')[0]) if choices(value) else quoted(value)}:"
            action += f"({' '.join(choices(value))})" if choices(value) else "_files" if value == "F" else ""
        together = f"({' '.join(names)})" if len(names) > 1 else ""
        spelled = "{" + ",".join(names) + "}" if len(names) > 1 else names[0]
        what = f"[{quoted(explanation)}]{action}'"
        specs.append(f"'{together}'{spelled}'{what}" if together else f"'{spelled}{what}")
    return specs


def zsh_completion(name, groups, types, commands):
    lines = [f"#compdef {name}", f"# Made from {name} --help by python/manual.py."]
    words = ["'1:input:_files'", "'2:output:_files'", f"'3:type:({' '.join(types)})'"] if types else ["'*:file:_files'"]
    if commands:
        lines += ["local -a flags", "case $words[2] in"]
        for command, options in commands.items():
            lines += [f"{command})", "    flags=(", *(f"        {spec}" for spec in zsh_specs(options)), "    )", "    ;;"]
        lines += ["*) flags=(--help --version) ;;", "esac"]
        words = [f"'1:command:({' '.join(commands)})'", "$flags", *words]
    else:
        words = zsh_specs([option for _, options in groups for option in options]) + words
    return "\n".join(lines) + "\n_arguments -s \\\n    " + " \\\n    ".join(words) + "\n"


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    new.replace(path)


def main():
    if len(sys.argv) != 4 or sys.argv[1] not in PROGRAMS:
        sys.exit(f"usage: python3 {sys.argv[0]} NAME PROGRAM FOLDER; NAME is one of {', '.join(PROGRAMS)}")
    name, program, folder = sys.argv[1], os.path.abspath(sys.argv[2]), pathlib.Path(sys.argv[3])
    usage, groups, commands = read_program(name, program)
    types = types_of(name, program)
    write(folder / "bash" / name, bash_completion(name, groups, types, commands))
    write(folder / "zsh" / ("_" + name), zsh_completion(name, groups, types, commands))
    write(folder / "man" / (name + ".1"), man_page(name, usage, groups, types))


if __name__ == "__main__":
    main()
