# What is changed in the pinned source, and why. Applied once, after unpacking; deps/README.md tells users.

# Replaces `from` by `to`, which must stand once in the file.
function(dt_replace_in file from to)
    file(READ "${file}" text)
    string(FIND "${text}" "${from}" first)
    string(FIND "${text}" "${from}" last REVERSE)
    if(first EQUAL -1 OR NOT first EQUAL last)
        message(FATAL_ERROR "The patch of ${file} (cmake/dt_patches.cmake) does not fit this version of the source")
    endif()
    string(REPLACE "${from}" "${to}" text "${text}")
    file(WRITE "${file}" "${text}")
endfunction()

# ggml's threads wait for each other by spinning without end. On cores that other programs want too, the one that is waited for
# may not be running: give the core away after about a thousand spins.
function(dt_patch_waiting source)
    set(file "${source}/ggml/src/ggml-cpu/ggml-cpu.c")
    dt_replace_in("${file}" [==[
    while (atomic_load_explicit(&tp->n_barrier_passed, memory_order_relaxed) == n_passed) {
        ggml_thread_cpu_relax();
]==] [==[
    for (unsigned n_spins = 1; atomic_load_explicit(&tp->n_barrier_passed, memory_order_relaxed) == n_passed; n_spins++) {
        if (n_spins % 1024 == 0) {
            sched_yield();
        }
        ggml_thread_cpu_relax();
]==])
    dt_replace_in("${file}" [==[
        // No new work. Keep polling.
]==] [==[
        // No new work. Keep polling.
        if (i % 1024 == 1023) {
            sched_yield();
        }
]==])
endfunction()

# A chat template comes from a model file, which nobody has read before: macros that call themselves and loops without end
# become exceptions.
function(dt_patch_templates source)
    dt_replace_in("${source}/common/jinja/runtime.cpp" [==[
value statement::execute(context & ctx) const {
    try {
]==] [==[
value statement::execute(context & ctx) const {
    static thread_local int  depth = 0;
    static thread_local long n_steps = 0;
    n_steps = depth == 0 ? 0 : n_steps + 1;
    if (depth >= 500) {
        throw rethrown_exception("the template nests too deeply, or calls itself without end");
    }
    if (n_steps >= 500000) {
        throw rethrown_exception("the template runs for too long");
    }
    struct level {
        level()  { depth++; }
        ~level() { depth--; }
    } level_here;
    try {
]==])
    dt_replace_in("${source}/common/jinja/runtime.cpp" [==[
        for (int64_t i = 0; i < repeat; ++i) {
]==] [==[
        if (repeat > 1000000) {
            throw std::runtime_error("a string is repeated more than a million times");
        }
        for (int64_t i = 0; i < repeat; ++i) {
]==])
    dt_replace_in("${source}/common/jinja/value.cpp" [==[
                throw raised_exception("range() step argument must not be zero");
            }
]==] [==[
                throw raised_exception("range() step argument must not be zero");
            }
            if (((double) stop - (double) start) / (double) step > 1e6) {
                throw raised_exception("range() is longer than a million");
            }
]==])
endfunction()

# A $ref that leads to itself inside allOf was followed without end.
function(dt_patch_schemas source)
    dt_replace_in("${source}/common/json-schema-to-grammar.cpp" [==[
                if (const auto * target = as<common_chat_schema_ref>(comp).target) {
                    add_component(*target, is_required);
]==] [==[
                if (const auto * target = as<common_chat_schema_ref>(comp).target) {
                    if (++n_followed > 1000) {
                        throw std::runtime_error("a $ref inside allOf leads to itself");
                    }
                    add_component(*target, is_required);
]==])
    dt_replace_in("${source}/common/json-schema-to-grammar.cpp" [==[
        std::function<void(const common_chat_schema &, bool)> add_component = [&](const common_chat_schema & comp, bool is_required) {
]==] [==[
        int n_followed = 0;
        std::function<void(const common_chat_schema &, bool)> add_component = [&](const common_chat_schema & comp, bool is_required) {
]==])
endfunction()

function(dt_patch_llama source)
    dt_patch_waiting("${source}")
    dt_patch_templates("${source}")
    dt_patch_schemas("${source}")
endfunction()
