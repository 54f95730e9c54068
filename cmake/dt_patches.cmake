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

# Where memory or a thread is refused, ggml asserts, writes through a null pointer or lets C++ end the process. The functions that
# we call say so instead: they return NULL, false or GGML_STATUS_ALLOC_FAILED, as they do for their large buffers.
function(dt_patch_memory source)
    set(file "${source}/ggml/src/ggml.c")
    dt_replace_in("${file}" [==[
        vsnprintf(buffer2, len + 1, format, args_copy);
        buffer2[len] = 0;
        g_logger_state.log_callback(level, buffer2, g_logger_state.log_callback_user_data);
]==] [==[
        if (buffer2 != NULL) {
            vsnprintf(buffer2, len + 1, format, args_copy);
        }
        g_logger_state.log_callback(level, buffer2 ? buffer2 : buffer, g_logger_state.log_callback_user_data);
]==])
    dt_replace_in("${file}" [==[
    struct ggml_context * ctx = GGML_MALLOC(sizeof(struct ggml_context));
]==] [==[
    struct ggml_context * ctx = malloc(sizeof(struct ggml_context));
    if (ctx == NULL) {
        return NULL;
    }
]==])
    dt_replace_in("${file}" [==[
    GGML_ASSERT(ctx->mem_buffer != NULL);

    GGML_ASSERT_ALIGNED(ctx->mem_buffer);
]==] [==[
    if (ctx->mem_buffer == NULL) {
        free(ctx);
        return NULL;
    }

    GGML_ASSERT_ALIGNED(ctx->mem_buffer);
]==])
    dt_replace_in("${file}" [==[
    result.keys = GGML_MALLOC(sizeof(struct ggml_tensor *) * size);
    result.used = GGML_CALLOC(ggml_bitset_size(size), sizeof(ggml_bitset_t));
    return result;
]==] [==[
    result.keys = malloc(sizeof(struct ggml_tensor *) * size);
    result.used = calloc(ggml_bitset_size(size), sizeof(ggml_bitset_t));
    if (result.keys == NULL || result.used == NULL) {
        ggml_hash_set_free(&result);
        memset(&result, 0, sizeof(result));
    }
    return result;
]==])
    set(file "${source}/ggml/src/ggml-alloc.c")
    dt_replace_in("${file}" [==[
    struct tallocr_chunk * chunk = calloc(1, sizeof(struct tallocr_chunk));
]==] [==[
    // the first one was made with the allocator
    struct tallocr_chunk * chunk = alloc->spare ? alloc->spare : calloc(1, sizeof(struct tallocr_chunk));
    if (chunk == NULL) {
        return -1;
    }
    alloc->spare = NULL;
]==])
    dt_replace_in("${file}" [==[
    struct tallocr_chunk * chunks[GGML_VBUFFER_MAX_CHUNKS];
    int n_chunks;

#ifdef GGML_ALLOCATOR_DEBUG
    struct {
]==] [==[
    struct tallocr_chunk * chunks[GGML_VBUFFER_MAX_CHUNKS];
    int n_chunks;
    struct tallocr_chunk * spare; // zeroed; taken before another one is allocated

#ifdef GGML_ALLOCATOR_DEBUG
    struct {
]==])
    dt_replace_in("${file}" [==[
static void ggml_dyn_tallocr_reset(struct ggml_dyn_tallocr * alloc) {
    for (int i = 0; i < GGML_VBUFFER_MAX_CHUNKS; i++) {
]==] [==[
static void ggml_dyn_tallocr_reset(struct ggml_dyn_tallocr * alloc) {
    if (alloc->spare == NULL && alloc->chunks[0] != NULL) {
        alloc->spare = alloc->chunks[0];
        alloc->chunks[0] = NULL;
        memset(alloc->spare, 0, sizeof(struct tallocr_chunk));
    }
    for (int i = 0; i < GGML_VBUFFER_MAX_CHUNKS; i++) {
]==])
    dt_replace_in("${file}" [==[
    struct ggml_dyn_tallocr * alloc = (struct ggml_dyn_tallocr *)malloc(sizeof(struct ggml_dyn_tallocr));

]==] [==[
    struct ggml_dyn_tallocr * alloc = (struct ggml_dyn_tallocr *)malloc(sizeof(struct ggml_dyn_tallocr));
    struct tallocr_chunk * spare = calloc(1, sizeof(struct tallocr_chunk));
    if (alloc == NULL || spare == NULL) {
        free(alloc);
        free(spare);
        return NULL;
    }

]==])
    dt_replace_in("${file}" [==[
        /*.n_chunks       = */ 0,
]==] [==[
        /*.n_chunks       = */ 0,
        /*.spare          = */ spare,
]==])
    dt_replace_in("${file}" [==[
        free(alloc->chunks[i]);
    }
    free(alloc);
]==] [==[
        free(alloc->chunks[i]);
    }
    free(alloc->spare);
    free(alloc);
]==])
    dt_replace_in("${file}" [==[
    GGML_ASSERT(galloc != NULL);

    galloc->bufts = calloc(n_bufs, sizeof(ggml_backend_buffer_type_t));
    GGML_ASSERT(galloc->bufts != NULL);

    galloc->buffers = calloc(n_bufs, sizeof(struct vbuffer *));
    GGML_ASSERT(galloc->buffers != NULL);

    galloc->buf_tallocs = calloc(n_bufs, sizeof(struct ggml_dyn_tallocr *));
    GGML_ASSERT(galloc->buf_tallocs != NULL);
]==] [==[
    if (galloc == NULL) {
        return NULL;
    }
    galloc->bufts       = calloc(n_bufs, sizeof(ggml_backend_buffer_type_t));
    galloc->buffers     = calloc(n_bufs, sizeof(struct vbuffer *));
    galloc->buf_tallocs = calloc(n_bufs, sizeof(struct ggml_dyn_tallocr *));
    if (galloc->bufts == NULL || galloc->buffers == NULL || galloc->buf_tallocs == NULL) {
        ggml_gallocr_free(galloc);
        return NULL;
    }
]==])
    dt_replace_in("${file}" [==[
            galloc->buf_tallocs[i] = ggml_dyn_tallocr_new(alignment, max_size);
        }
    }
    galloc->n_buffers = n_bufs;
]==] [==[
            galloc->buf_tallocs[i] = ggml_dyn_tallocr_new(alignment, max_size);
            if (galloc->buf_tallocs[i] == NULL) {
                ggml_gallocr_free(galloc);
                return NULL;
            }
        }
        galloc->n_buffers = i + 1;
    }
]==])
    dt_replace_in("${file}" [==[
        GGML_ASSERT(galloc->hash_set.keys != NULL);

        free(galloc->hash_values);
        galloc->hash_values = malloc(sizeof(struct hash_node) * galloc->hash_set.size);
        GGML_ASSERT(galloc->hash_values != NULL);
]==] [==[
        free(galloc->hash_values);
        galloc->hash_values = malloc(sizeof(struct hash_node) * galloc->hash_set.size);
        if (galloc->hash_set.keys == NULL || galloc->hash_values == NULL) {
            ggml_hash_set_free(&galloc->hash_set);
            memset(&galloc->hash_set, 0, sizeof(galloc->hash_set));
            return false;
        }
]==])
    dt_replace_in("${file}" [==[
        GGML_ASSERT(galloc->node_allocs != NULL);
]==] [==[
        if (galloc->node_allocs == NULL) {
            galloc->n_nodes = 0;
            return false;
        }
]==])
    dt_replace_in("${file}" [==[
        GGML_ASSERT(galloc->leaf_allocs != NULL);
]==] [==[
        if (galloc->leaf_allocs == NULL) {
            galloc->n_leafs = 0;
            return false;
        }
]==])
    dt_replace_in("${file}" [==[
            ggml_vbuffer_free(galloc->buffers[i]);
            if (no_alloc) {
                galloc->buffers[i] = NULL;
            } else {
]==] [==[
            ggml_vbuffer_free(galloc->buffers[i]);
            galloc->buffers[i] = NULL;
            if (!no_alloc) {
]==])
    set(file "${source}/ggml/src/ggml-cpu/ggml-cpu.c")
    dt_replace_in("${file}" [==[
        ggml_aligned_malloc(sizeof(struct ggml_threadpool));
    {
]==] [==[
        ggml_aligned_malloc(sizeof(struct ggml_threadpool));
    struct ggml_compute_state * workers = ggml_aligned_malloc(sizeof(struct ggml_compute_state) * tpp->n_threads);
    if (threadpool == NULL || workers == NULL) {
        ggml_aligned_free(threadpool, sizeof(struct ggml_threadpool));
        ggml_aligned_free(workers, sizeof(struct ggml_compute_state) * tpp->n_threads);
        return NULL;
    }
    {
]==])
    dt_replace_in("${file}" [==[
    struct ggml_compute_state * workers = ggml_aligned_malloc(workers_size);

]==] "\n")
    dt_replace_in("${file}" [==[
        GGML_ASSERT(rc == 0);
    }

    ggml_thread_cpumask_next(tpp->cpumask, workers[0].cpumask]==] [==[
        if (rc != 0) {
            threadpool->n_threads = j; // those that are to be stopped
            ggml_threadpool_free(threadpool);
            return NULL;
        }
    }

    ggml_thread_cpumask_next(tpp->cpumask, workers[0].cpumask]==])
    dt_replace_in("${source}/ggml/src/ggml-cpu/ggml-cpu.cpp" [==[
        cpu_ctx->work_data = new uint8_t[cplan.work_size];
]==] [==[
        cpu_ctx->work_data = new (std::nothrow) uint8_t[cplan.work_size];
]==])
    dt_replace_in("${source}/ggml/src/ggml-cpu/ggml-cpu.cpp" "#include <cctype>\n" "#include <cctype>\n#include <new>\n")
    # its destructor makes a list of what it holds, and an exception there ends the process
    set(file "${source}/vendor/nlohmann/json.hpp")
    dt_replace_in("${file}" [==[
                std::vector<basic_json> stack;

                // move the top-level items to stack
                if (t == value_t::array)
]==] [==[
                std::vector<basic_json> stack;
                try {

                // move the top-level items to stack
                if (t == value_t::array)
]==])
    dt_replace_in("${file}" [==[
                    // it's now safe that current_item get destructed
                    // since it doesn't have any children
                }
]==] [==[
                    // it's now safe that current_item get destructed
                    // since it doesn't have any children
                }
                } catch (const std::bad_alloc &) {} // what is left goes with its parent
]==])
endfunction()

# A chat template comes from a model file, which nobody has read before. What calls itself, runs or grows without end, or would be a
# value that contains itself, becomes an exception: within 1.5 s of processor time and about 300 MB.
function(dt_patch_templates source)
    set(runtime "${source}/common/jinja/runtime.cpp")
    set(value "${source}/common/jinja/value.cpp")
    dt_replace_in("${source}/common/jinja/utils.h" [==[
namespace jinja {
]==] [==[
namespace jinja {

// Throws where the template has run for too long or a text or list of it would get too large. In runtime.cpp.
void check_limits(size_t size = 0);
]==])
    dt_replace_in("${runtime}" [==[
value statement::execute(context & ctx) const {
    try {
]==] [==[
void check_limits(size_t size) {
    struct timespec used; // processor time of this thread: every rendering has one of its own
    if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used) == 0 && used.tv_sec + used.tv_nsec * 1e-9 > 1.5) {
        throw rethrown_exception("the template runs for too long");
    }
    if (size > 4000000) {
        throw rethrown_exception("a text or list of the template grows too large");
    }
}

// A value that contains itself would be walked through without end.
static void check_cycle(const value & inner, const value & outer) {
    check_limits();
    if (inner.get() == outer.get()) {
        throw rethrown_exception("a value of the template would contain itself");
    }
    if (is_val<value_array>(inner)) {
        for (const auto & item : inner->as_array()) {
            check_cycle(item, outer);
        }
    } else if (is_val<value_object>(inner)) {
        for (const auto & pair : inner->as_ordered_object()) {
            check_cycle(pair.second, outer);
        }
    }
}

void append_to_array(const value & array, const value & item) {
    check_cycle(item, array);
    const_cast<value_array_t *>(cast_val<value_array>(array))->push_back(item);
}

value statement::execute(context & ctx) const {
    static thread_local int depth = 0;
    if (depth >= 500) {
        throw rethrown_exception("the template nests too deeply, or calls itself without end");
    }
    check_limits();
    struct level {
        level()  { depth++; }
        ~level() { depth--; }
    } level_here;
    try {
]==])
    dt_replace_in("${runtime}" [==[
        context loop_scope(scope);
]==] [==[
        check_limits();
        context loop_scope(scope);
]==])
    dt_replace_in("${runtime}" [==[
            auto result = mk_val<value_array>();
            for (const auto & item : left_arr) {
]==] [==[
            auto result = mk_val<value_array>();
            check_limits(left_arr.size() + right_arr.size());
            for (const auto & item : left_arr) {
]==])
    dt_replace_in("${runtime}" [==[
        auto output = left_val->as_string().append(right_val->as_string());
]==] [==[
        auto output = left_val->as_string().append(right_val->as_string());
        check_limits(output.length() + output.parts.size());
]==])
    dt_replace_in("${runtime}" [==[
        for (int64_t i = 0; i < repeat; ++i) {
]==] [==[
        check_limits(repeat > 1000000 ? SIZE_MAX : (str.length() + str.parts.size()) * repeat);
        for (int64_t i = 0; i < repeat; ++i) {
]==])
    dt_replace_in("${runtime}" [==[
        obj_ptr->insert(prop_name, rhs);

    } else {
]==] [==[
        check_cycle(rhs, object);
        obj_ptr->insert(prop_name, rhs);

    } else {
]==])
    dt_replace_in("${value}" [==[
namespace jinja {
]==] [==[
namespace jinja {

void append_to_array(const value & array, const value & item); // in runtime.cpp
]==])
    dt_replace_in("${value}" [==[
            const value_array_t * arr = cast_val<value_array>(args.get_pos(0));
            // need to use const_cast here to modify the array
            value_array_t * arr_editable = const_cast<value_array_t *>(arr);
            arr_editable->push_back(args.get_pos(1));
]==] [==[
            append_to_array(args.get_pos(0), args.get_pos(1));
]==])
    dt_replace_in("${value}" [==[
                    new_res.reserve(str.length() + new_str.length() * (str.length() + 1));
                    new_res += new_str;
                    for (const char c : str) {
]==] [==[
                    new_res += new_str;
                    for (const char c : str) {
                        check_limits(new_res.length());
]==])
    dt_replace_in("${value}" [==[
                        str.replace(pos, old_str.length(), new_str);
]==] [==[
                        check_limits(str.length());
                        str.replace(pos, old_str.length(), new_str);
]==])
    dt_replace_in("${value}" [==[
                token = str.substr(0, pos);
]==] [==[
                check_limits();
                token = str.substr(0, pos);
]==])
    dt_replace_in("${value}" [==[
                indent.assign(val_width->as_int(), ' ');
]==] [==[
                check_limits(val_width->as_int());
                indent.assign(val_width->as_int(), ' ');
]==])
    dt_replace_in("${value}" [==[
                indented += line;
            }
]==] [==[
                indented += line;
                check_limits(indented.length());
            }
]==])
    dt_replace_in("${value}" [==[
                    result += delim;
                }
]==] [==[
                    result += delim;
                }
                check_limits(result.length());
]==])
    dt_replace_in("${value}" [==[
        indent = static_cast<int>(val_indent->as_int());
]==] [==[
        check_limits(val_indent->as_int() > 0 ? val_indent->as_int() * 1000 : 0);
        indent = static_cast<int>(val_indent->as_int());
]==])
    dt_replace_in("${value}" [==[
    if (is_val<value_none>(val) || val->is_undefined()) {
        oss << "null";
]==] [==[
    check_limits(oss.tellp());
    if (is_val<value_none>(val) || val->is_undefined()) {
        oss << "null";
]==])
    dt_replace_in("${value}" [==[
    val->stats.used = true;
    if (deep) {
]==] [==[
    check_limits();
    val->stats.used = true;
    if (deep) {
]==])
    dt_replace_in("${value}" [==[
                throw raised_exception("range() step argument must not be zero");
            }
]==] [==[
                throw raised_exception("range() step argument must not be zero");
            }
            if (((double) stop - (double) start) / (double) step > 1e5) {
                throw raised_exception("range() is longer than a hundred thousand");
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

# A grammar's syntax error goes to the log, as the others do, rather than to stderr. Filtering by a grammar in which much is optional
# ends. Repetitions are written out before anything is known to match: {2,0} would be without end, and "..."{2000} a thousand times over
# takes gigabytes.
function(dt_patch_grammars source)
    set(file "${source}/src/llama-grammar.cpp")
    dt_replace_in("${file}" [==[
        fprintf(stderr, "%s: error parsing grammar: %s\n\n%s\n", __func__, err.what(), src);
]==] [==[
        LLAMA_LOG_ERROR("%s\n", err.what());
]==])
    dt_replace_in("${source}/src/llama-grammar.h" [==[
    llama_grammar_rules rules;

    llama_grammar_parser(const struct llama_vocab * vocab = nullptr) : vocab(vocab) {}
]==] [==[
    llama_grammar_rules rules;
    uint64_t n_written_out = 0; // elements that repetitions have come to

    llama_grammar_parser(const struct llama_vocab * vocab = nullptr) : vocab(vocab) {}
]==])
    dt_replace_in("${file}" [==[
        if (n_prev_rules * total_rules > MAX_REPETITION_THRESHOLD) {
]==] [==[
        if (!no_max && max_times < min_times) {
            throw std::runtime_error(std::string("a repetition with more times at the least than at the most at ") + pos);
        }
        n_written_out += prev_rule.size() * total_rules;
        if (n_written_out > 1000000) {
            throw std::runtime_error("the repetitions of this grammar come to more than a million characters and rules");
        }
        if (n_prev_rules * total_rules > MAX_REPETITION_THRESHOLD) {
]==])
    dt_replace_in("${file}" [==[
// transforms a grammar pushdown stack into N possible stacks, all ending
// at a character range (terminal element)
]==] [==[
// Stacks looked at since filtering began. In a grammar in which much may be left out their number grows with the power of a token's
// length.
static thread_local long n_stacks_seen = 0;

// transforms a grammar pushdown stack into N possible stacks, all ending
// at a character range (terminal element)
]==])
    dt_replace_in("${file}" [==[
        llama_grammar_stack curr_stack_candidate = std::move(todo.back());
]==] [==[
        if (++n_stacks_seen > 3000000) {
            throw std::runtime_error("too many ways lead through it here; let less of it be optional");
        }
        llama_grammar_stack curr_stack_candidate = std::move(todo.back());
]==])
    dt_replace_in("${file}" [==[
void llama_grammar_apply_impl(const struct llama_grammar & grammar, llama_token_data_array * cur_p) {
]==] [==[
void llama_grammar_apply_impl(const struct llama_grammar & grammar, llama_token_data_array * cur_p) {
    n_stacks_seen = 0;
]==])
endfunction()

# The RPC client waits for a server for ever, also for one whose machine is gone, and sends every graph anew. A lost machine is
# noticed within half a minute on both sides; a client gives up where nothing comes within the time that src/graph/rpc.c sets; a
# signal ends no connection; a graph that is to be computed again is not sent again.
function(dt_patch_rpc source)
    set(transport "${source}/ggml/src/ggml-rpc/transport.cpp")
    set(rpc "${source}/ggml/src/ggml-rpc/ggml-rpc.cpp")
    dt_replace_in("${source}/ggml/src/ggml-rpc/transport.h" [==[
bool rpc_transport_init();
]==] [==[
// Seconds that a client waits for a server to take or send something; 0: for ever. Of connections made afterwards.
void rpc_transport_set_timeout(int seconds);
bool rpc_transport_init();
]==])
    dt_replace_in("${transport}" [==[
#include <cstring>
#include <mutex>
]==] [==[
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
]==])
    dt_replace_in("${transport}" [==[
        if (n < 0) {
            GGML_LOG_ERROR("send failed]==] [==[
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            GGML_LOG_ERROR("send failed]==])
    dt_replace_in("${transport}" [==[
        if (n < 0) {
            GGML_LOG_ERROR("recv failed]==] [==[
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            GGML_LOG_ERROR("recv failed]==])
    dt_replace_in("${transport}" [==[
static bool set_no_delay(sockfd_t sockfd) {
    int flag = 1;
]==] [==[
static std::atomic<int> client_timeout{0};

void rpc_transport_set_timeout(int seconds) {
    client_timeout = seconds;
}

static void set_client_timeout(sockfd_t sockfd) {
#ifndef _WIN32
    struct timeval limit = {};
    limit.tv_sec = client_timeout;
    setsockopt(sockfd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    setsockopt(sockfd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
#endif
}

static void set_option(sockfd_t sockfd, int level, int name, int value) {
    setsockopt(sockfd, level, name, (char *)&value, sizeof(int));
}

static bool set_no_delay(sockfd_t sockfd) {
    int flag = 1;
    set_option(sockfd, SOL_SOCKET, SO_KEEPALIVE, 1); // after 10 s without a word ask every 5 s, 4 times
#ifdef TCP_KEEPIDLE
    set_option(sockfd, IPPROTO_TCP, TCP_KEEPIDLE, 10);
#elif defined(TCP_KEEPALIVE)
    set_option(sockfd, IPPROTO_TCP, TCP_KEEPALIVE, 10);
#endif
#ifdef TCP_KEEPINTVL
    set_option(sockfd, IPPROTO_TCP, TCP_KEEPINTVL, 5);
    set_option(sockfd, IPPROTO_TCP, TCP_KEEPCNT, 4);
#endif
]==])
    dt_replace_in("${transport}" [==[
    struct sockaddr_in addr;
    addr.sin_family = AF_INET;
]==] [==[
    set_client_timeout(sockfd);
    struct sockaddr_in addr;
    addr.sin_family = AF_INET;
]==])
    dt_replace_in("${rpc}" [==[
    if (std::strcmp(name, "ggml_backend_rpc_start_server") == 0) {
]==] [==[
    if (std::strcmp(name, "rpc_transport_set_timeout") == 0) {
        return (void *)rpc_transport_set_timeout;
    }
    if (std::strcmp(name, "ggml_backend_rpc_start_server") == 0) {
]==])
    dt_replace_in("${rpc}" [==[
    void start(const std::string & endpoint);
    void work();
]==] [==[
    // Sends a graph or, where it is the very one that the server keeps for the device, no more than that it is to be computed.
    void compute(uint32_t device, std::shared_ptr<const void> graph, size_t size);
    // A server that frees a buffer forgets the graphs that it keeps.
    void free_buffer(std::shared_ptr<const void> input, size_t input_size);

    void start(const std::string & endpoint);
    void work();
]==])
    dt_replace_in("${rpc}" [==[
    std::atomic_bool running;
    std::thread      thread;
};
]==] [==[
    std::atomic_bool running;
    std::thread      thread;

    struct sent_graph {
        std::shared_ptr<const void> data;
        size_t                      size;
    };
    std::mutex                               graphs_mutex;
    std::unordered_map<uint32_t, sent_graph> sent_graphs; // by device
};
]==])
    dt_replace_in("${rpc}" [==[
ggml_backend_event_t rpc_dispatcher::event_new(ggml_backend_dev_t dev) {
]==] [==[
void rpc_dispatcher::compute(uint32_t device, std::shared_ptr<const void> graph, size_t size) {
    std::lock_guard<std::mutex> lock(graphs_mutex); // what is remembered and what is queued have the same order
    sent_graph & last = sent_graphs[device];
    if (last.data != nullptr && last.size == size && memcmp(last.data.get(), graph.get(), size) == 0) {
        auto request = std::make_shared<rpc_msg_graph_recompute_req>();
        request->device = device;
        send_async(RPC_CMD_GRAPH_RECOMPUTE, request, sizeof(*request));
    } else {
        last = {graph, size};
        send_async(RPC_CMD_GRAPH_COMPUTE, graph, size);
    }
}

void rpc_dispatcher::free_buffer(std::shared_ptr<const void> input, size_t input_size) {
    std::lock_guard<std::mutex> lock(graphs_mutex);
    sent_graphs.clear();
    send(RPC_CMD_FREE_BUFFER, input, input_size);
}

ggml_backend_event_t rpc_dispatcher::event_new(ggml_backend_dev_t dev) {
]==])
    dt_replace_in("${rpc}" [==[
    ctx->dispatcher->send(RPC_CMD_FREE_BUFFER, request, sizeof(*request));
]==] [==[
    ctx->dispatcher->free_buffer(request, sizeof(*request));
]==])
    dt_replace_in("${rpc}" [==[
        rpc_ctx->dispatcher->send_async(RPC_CMD_GRAPH_COMPUTE, input_ptr, input_size);
]==] [==[
        rpc_ctx->dispatcher->compute(rpc_ctx->device, input_ptr, input_size);
]==])
endfunction()

# The Vulkan headers of Debian 12 (1.3.239) know no VK_EXT_layer_settings; ggml only tells validation layers something by it.
function(dt_patch_vulkan source)
    set(file "${source}/ggml/src/ggml-vulkan/ggml-vulkan.cpp")
    dt_replace_in("${file}" [==[
    VkBool32 enable_best_practice = layer_settings;
]==] [==[
#ifdef VK_EXT_layer_settings
    VkBool32 enable_best_practice = layer_settings;
]==])
    dt_replace_in("${file}" [==[
    vk::InstanceCreateInfo instance_create_info(vk::InstanceCreateFlags{}, &app_info, layers, extensions, &layer_setting_info);
]==] [==[
    vk::InstanceCreateInfo instance_create_info(vk::InstanceCreateFlags{}, &app_info, layers, extensions, &layer_setting_info);
#else
    vk::InstanceCreateInfo instance_create_info(vk::InstanceCreateFlags{}, &app_info, layers, extensions);
#endif
]==])
endfunction()

# What a schema demands and a grammar can't say is an error, not a line on stderr: the reply is promised to follow the schema.
function(dt_patch_patterns source)
    dt_replace_in("${source}/common/json-schema-to-grammar.cpp" [==[
            _warnings.push_back("pattern " + pattern + " is not supported (" + err.what() + "), accepting any string");
]==] [==[
            _errors.push_back("pattern " + pattern + " is not supported (" + err.what() + ")");
]==])
endfunction()

function(dt_patch_llama source)
    dt_patch_waiting("${source}")
    dt_patch_memory("${source}")
    dt_patch_templates("${source}")
    dt_patch_schemas("${source}")
    dt_patch_patterns("${source}")
    dt_patch_grammars("${source}")
    dt_patch_rpc("${source}")
    dt_patch_vulkan("${source}")
endfunction()
