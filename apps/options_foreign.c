/*
 * llama.cpp's flags that are not ours. See options_foreign.h.
 */
#include "options_foreign.h"

#include <stddef.h>
#include <string.h>

#define N_OF(array) (sizeof(array) / sizeof(array)[0])
#define IN_THE_FILE "what the model's file says counts; gguf-set-metadata of Python's package gguf changes it there"
#define BY_TYPE "TYPE alone decides how each tensor is quantized"

static const dt_foreign_flag flags[] = {
    /* accepted */
    {"-fa, --flash-attn", DT_FOREIGN_SWITCH, true, "attention is always computed in one pass here"},
    {"-ub, --ubatch-size", DT_FOREIGN_VALUE, true, "--batch-size alone says how many tokens are read at a time"},
    {"--mmap, --mlock", DT_FOREIGN_NONE, true,
     "weights are mapped unless --no-mmap is given, and stay in memory as the system sees fit"},
    {"--warmup, --no-warmup", DT_FOREIGN_NONE, true, "there is no warm-up run to have or to leave out"},
    {"--jinja", DT_FOREIGN_NONE, true, "chat templates are always Jinja"},
    {"--no-context-shift", DT_FOREIGN_NONE, true, "nothing is dropped from a full context unless --cache-eviction is given"},
    {"-cb, --cont-batching", DT_FOREIGN_NONE, true, "requests always share batches"},
    {"--metrics", DT_FOREIGN_NONE, true, "the server's /metrics is always there"},
    {"--webui, --cache-prompt", DT_FOREIGN_NONE, true, "the server's page and its caching are always there"},
    {"--perf, --no-perf, -no-perf, --show-timings, --no-show-timings", DT_FOREIGN_NONE, true,
     "timings are always told; --log-level warn keeps them away"},
    {"-co, --color, --simple-io", DT_FOREIGN_NONE, true, "text is always plain"},
    {"-kvu, --kv-unified", DT_FOREIGN_NONE, true, "all conversations share the memory that --kv-memory allows"},
    {"-dt, --defrag-thold", DT_FOREIGN_VALUE, true, "the cache closes its gaps by itself"},
    {"--swa-full", DT_FOREIGN_NONE, true, "what a sliding window has passed is read again where a conversation goes back to it"},
    {"--offline", DT_FOREIGN_NONE, true, "nothing is ever fetched"},
    {"--penalize-nl", DT_FOREIGN_NONE, true, "--repeat-penalty counts line ends like other tokens"},
    {"-kvo, --kv-offload", DT_FOREIGN_NONE, true, "a layer's cache lies where the layer runs"},
    {"--op-offload, --no-op-offload, --no-host", DT_FOREIGN_NONE, true, "a layer is computed where its weights lie"},
    {"--log-prefix, --no-log-prefix, --log-timestamps, --no-log-timestamps", DT_FOREIGN_NONE, true,
     "a line of the log is its sentence"},
    {"--log-colors", DT_FOREIGN_SWITCH, true, "text is always plain"},
    {"-ctxcp, --ctx-checkpoints, --swa-checkpoints, -cms, --checkpoint-min-step", DT_FOREIGN_VALUE, true,
     "what a sliding window has passed is read again where a conversation goes back to it"},
    {"--no-mmproj, --mmproj-auto, --no-mmproj-auto", DT_FOREIGN_NONE, true, "there is text only"},
    {"--ui", DT_FOREIGN_NONE, true, "the server's page is always there"},
    {"-bs, --backend-sampling", DT_FOREIGN_NONE, true, "sampling takes no time worth a device"},
    {"--repack", DT_FOREIGN_NONE, true, "weights are always packed anew where that makes them faster"},
    /* cache */
    {"--keep", DT_FOREIGN_VALUE, false, "the first tokens stay under eviction; how many is sink_tokens of an --eviction-config"},
    {"--context-shift", DT_FOREIGN_NONE, false, "--cache-eviction goes on past a full context (docs/memory.md)"},
    {"-gan, --grp-attn-n, -gaw, --grp-attn-w", DT_FOREIGN_VALUE, false,
     "--cache-eviction goes on past what the model was trained for (docs/memory.md)"},
    {"-no-kvu, --no-kv-unified", DT_FOREIGN_NONE, false, "-c holds for each conversation; all share what --kv-memory allows"},
    {"-ctk, --cache-type-k, -ctv, --cache-type-v", DT_FOREIGN_VALUE, false, "--kv-type f16 or int8 sets keys and values"},
    {"-nkvo, --no-kv-offload", DT_FOREIGN_NONE, false,
     "a layer's cache lies where the layer runs; a smaller -ngl keeps more of it here"},
    {"--prompt-cache, --slot-save-path", DT_FOREIGN_VALUE, false,
     "./main --session FILE keeps a conversation, ./deeptutor-server --session-dir FOLDER all of them"},
    {"--prompt-cache-all, --prompt-cache-ro", DT_FOREIGN_NONE, false,
     "--session FILE keeps a conversation, and always saves it at the end"},
    /* drafts */
    {"-md, --model-draft, --spec-draft-model", DT_FOREIGN_VALUE, false, "--draft-model FILE names the model that guesses"},
    {"-td, --threads-draft, -tbd, --threads-batch-draft, -Cd, -Crd, -ctkd, -ctvd, --cache-type-k-draft, --cache-type-v-draft, "
     "-devd, "
     "--device-draft, -ngld, --gpu-layers-draft, --n-gpu-layers-draft, -hfd, -hfrd, --hf-repo-draft",
     DT_FOREIGN_VALUE, false, "--draft-model FILE runs with the threads of the model, on the processor"},
    {"--draft-min, --draft-n-min, --draft-p-min, --draft-p-split", DT_FOREIGN_VALUE, false,
     "how many tokens are worth guessing is found out while it goes; --draft-max N bounds it"},
    {"--spec-type, -lcs, --lookup-cache-static, -lcd, --lookup-cache-dynamic", DT_FOREIGN_VALUE, false,
     "--draft-lookup guesses without a model, --draft-model FILE with one"},
    {"--draft, --draft-n, --spec-draft-n-max", DT_FOREIGN_VALUE, false, "--draft-max N says how many tokens are guessed at once"},
    {"--spec-*", DT_FOREIGN_VALUE, false, "guessing has --draft-lookup, --draft-model FILE and --draft-max N"},
    {"-pg", DT_FOREIGN_VALUE, false, "./deeptutor-bench reads -p tokens and generates -n at each depth of -d"},
    /* text */
    {"-p, --prompt", DT_FOREIGN_VALUE, false,
     "./main takes a prompt so; --port N is where ./deeptutor-server listens, -i FILE holds the rows of ./deeptutor-batch"},
    {"-i, --interactive, -if, --interactive-first, -cml, --chatml", DT_FOREIGN_NONE, false,
     "-cnv chats, with the model's own template"},
    {"-st, --single-turn", DT_FOREIGN_NONE, false, "-cnv ends where its input ends: echo QUESTION | ... -cnv"},
    {"-r, --reverse-prompt, --in-prefix, --in-suffix", DT_FOREIGN_VALUE, false,
     "-cnv ends turns by the model's template; there are no stop words here"},
    {"-bf, --binary-file", DT_FOREIGN_VALUE, false, "-f FILE reads a prompt as it is"},
    {"-sysf, --system-prompt-file", DT_FOREIGN_VALUE, false, "write -sys \"$(cat FILE)\""},
    {"--chat-template-file", DT_FOREIGN_VALUE, false, "write --chat-template \"$(cat FILE)\""},
    {"--chat-template-kwargs", DT_FOREIGN_VALUE, false,
     "a template gets the messages alone; what else it asks for, write into it: --chat-template TEXT"},
    {"-mli, --multiline-input", DT_FOREIGN_NONE, false, "-f - reads a text of several lines from stdin"},
    {"-jf, --json-schema-file", DT_FOREIGN_VALUE, false, "write --json-schema \"$(cat FILE)\""},
    {"-sp, --special", DT_FOREIGN_NONE, false, "special tokens are never shown as text"},
    {"--spm-infill", DT_FOREIGN_NONE, false, "there is no infilling; a prompt of -p or -f is taken as it is"},
    {"--license, --licenses", DT_FOREIGN_NONE, false, "the files LICENSE and deps/README.md name them"},
    {"--no-jinja", DT_FOREIGN_NONE, false, "chat templates are always Jinja; --chat-template NAME takes a built-in one"},
    /* sampling */
    {"--repeat-last-n", DT_FOREIGN_VALUE, false, "--repeat-penalty looks at the last 64 tokens, always"},
    {"--presence-penalty, --frequency-penalty, --typical, --typical-p, --top-nsigma, --top-n-sigma, --xtc-*, --mirostat, "
     "--mirostat-*, "
     "--dynatemp-*, --dry-*, --adaptive-*, --samplers, --sampler-seq, --sampling-seq, -ser, -l, --logit-bias",
     DT_FOREIGN_VALUE, false, "sampling has --temp, --top-k, --top-p, --min-p and --repeat-penalty"},
    {"--reasoning-*, -rea, --reasoning", DT_FOREIGN_VALUE, false, "what a model thinks aloud is text like any other"},
    /* model */
    {"-hf, -hfr, --hf-repo, -hff, --hf-file, -hft, --hf-token, -mu, --model-url, -dr, --docker-repo, --models-*", DT_FOREIGN_VALUE,
     false, "nothing is fetched here; give a file with -m, or make one with convert.py"},
    {"--lora, --lora-*, --control-vector, --control-vector-*", DT_FOREIGN_VALUE, false,
     "merge adapters into the model before converting it"},
    {"-mm, --mmproj, -mmu, --mmproj-url, --image, --image-*, --audio, --video", DT_FOREIGN_VALUE, false,
     "there is text only: images, sound and films are not read"},
    {"--rope-*, --yarn-*", DT_FOREIGN_VALUE, false, "positions are scaled as the model's file says"},
    {"--override-kv", DT_FOREIGN_VALUE, false, IN_THE_FILE},
    {"-lm, --load-mode", DT_FOREIGN_VALUE, false, "weights are mapped, or read as a whole with --no-mmap"},
    {"--check-tensors", DT_FOREIGN_NONE, false,
     "how a file is laid out is always checked, its numbers never; compare it with its checksum"},
    {"-nr, --no-repack", DT_FOREIGN_NONE, false, "weights are always packed anew where that makes them faster"},
    /* machine */
    {"-sm, --split-mode, -mg, --main-gpu", DT_FOREIGN_VALUE, false,
     "--device NAME,NAME shares the layers among devices, --tensor-split says how"},
    {"-dev", DT_FOREIGN_VALUE, false, "--device NAME says where layers run"},
    {"--list-devices", DT_FOREIGN_NONE, false, "--device list shows them"},
    {"--rpc", DT_FOREIGN_VALUE, false, "--device rpc=HOST:PORT names another machine"},
    {"-ot, --override-tensor, -ncmoe, --n-cpu-moe, -ncffn, --n-cpu-ffn, -fit, --fit, -fitt, --fit-target, -fitc, --fit-ctx",
     DT_FOREIGN_VALUE, false, "-ngl says how many whole layers the device takes"},
    {"-cmoe, --cpu-moe", DT_FOREIGN_NONE, false, "-ngl says how many whole layers the device takes"},
    {"-C, --cpu-mask, -Cr, --cpu-range, --cpu-strict, -Cb, -Crb, --cpu-*, --numa, --prio, --prio-batch, --poll, --poll-batch",
     DT_FOREIGN_VALUE, false, "taskset, numactl and nice place a process"},
    {"-np, --parallel", DT_FOREIGN_VALUE, false,
     "--parallel N of ./deeptutor-server and ./deeptutor-batch computes several replies at once"},
    /* log, server */
    {"-v, --verbose, --log-verbose", DT_FOREIGN_NONE, false, "--log-level debug tells more"},
    {"-lv, --verbosity, --log-verbosity", DT_FOREIGN_VALUE, false, "--log-level error, warn, info or debug says how much is told"},
    {"--log-file", DT_FOREIGN_VALUE, false, "the log goes to stderr: 2>FILE keeps it"},
    {"--verbose-prompt", DT_FOREIGN_NONE, false, "--display-prompt shows the prompt"},
    {"--log-disable", DT_FOREIGN_NONE, false, "--log-level error tells errors only"},
    {"--embedding, --embeddings, --embd-*, --pooling, --rerank, --reranking", DT_FOREIGN_NONE, false,
     "there is text generation only"},
    {"--no-webui, --no-ui, --slots, --no-slots, --props", DT_FOREIGN_NONE, false,
     "docs/server.md lists what the server answers, always"},
    {"-nocb, --no-cont-batching, --no-cache-prompt", DT_FOREIGN_NONE, false,
     "requests always share batches, and a conversation's cache is always kept"},
    {"-cram, --cache-ram", DT_FOREIGN_VALUE, false,
     "--kv-memory bounds all caches, --disk-memory what --session-dir keeps on disk"},
    {"-sps, --slot-prompt-similarity", DT_FOREIGN_VALUE, false, "a conversation is found again by its beginning"},
    {"--tools, --mcp-*, -ag, --agent", DT_FOREIGN_VALUE, false, "the server runs nothing but the model"},
    {"--cache-reuse", DT_FOREIGN_VALUE, false, "a conversation is found again by its beginning, whatever its length"},
    {"-to, --timeout, --threads-http, --ssl-key-file, --ssl-cert-file, --path, --api-prefix, --cors-*, --reuse-port",
     DT_FOREIGN_VALUE, false, "put a proxy such as nginx before the server for that"},
};

static const dt_foreign_flag quantize_flags[] = {
    {"--allow-requantize", DT_FOREIGN_NONE, false,
     "what is quantized already stays as it is, since a second time loses more; give the model in F16, BF16 or F32"},
    {"--leave-output-tensor, --pure", DT_FOREIGN_NONE, false, BY_TYPE},
    {"--output-tensor-type, --token-embedding-type, --tensor-type, --tensor-type-file", DT_FOREIGN_VALUE, false, BY_TYPE},
    {"--imatrix, --include-weights, --exclude-weights", DT_FOREIGN_VALUE, false,
     "importance matrices are not read here; llama-quantize reads them; docs/models.md lists the types that run here"},
    {"--keep-split", DT_FOREIGN_NONE, false, "the output is always one file"},
    {"--prune-layers", DT_FOREIGN_VALUE, false, "all layers stay"},
    {"--override-kv", DT_FOREIGN_VALUE, false, IN_THE_FILE},
    {"--dry-run", DT_FOREIGN_NONE, false, "the size is told when the work is done"},
    {"--max-buffer-size", DT_FOREIGN_VALUE, false, "buffers never hold more than 512 MiB"},
};

/* names: with ", " between them; one that ends in * stands for all that begin so. */
static bool lists(const char *names, const char *name) {
    const size_t n = strlen(name);
    while (*names != 0) {
        const size_t length = strcspn(names, ",");
        const bool family = names[length - 1] == '*';
        if (family ? n >= length && strncmp(names, name, length - 1) == 0 : n == length && strncmp(names, name, n) == 0) {
            return true;
        }
        names += names[length] == 0 ? length : length + 2;
    }
    return false;
}

static const dt_foreign_flag *find(const dt_foreign_flag *rows, size_t n, const char *name) {
    for (size_t i = 0; name[0] == '-' && name[1] != 0 && i < n; i++) {
        if (lists(rows[i].names, name)) {
            return &rows[i];
        }
    }
    return NULL;
}

const dt_foreign_flag *dt_find_foreign_flag(const char *name) { return find(flags, N_OF(flags), name); }
const dt_foreign_flag *dt_find_quantize_flag(const char *name) { return find(quantize_flags, N_OF(quantize_flags), name); }

bool dt_is_switch_word(const char *word) {
    static const char *const words[] = {"on", "off", "auto", "0", "1"};
    for (size_t i = 0; i < N_OF(words); i++) {
        if (strcmp(words[i], word) == 0) {
            return true;
        }
    }
    return false;
}
