# ggml, libllama and the few sources of llama.cpp's `common` that we need: found, fetched, built.
#
# dt_add_llama() makes the target dt_llama, sets DT_HAVE_LLAMA_COMMON to 1 or 0 and DT_LLAMA_FOLDER to the source's folder. Three ways, in this order:
#   DT_SYSTEM_LLAMA=ON    an installed ggml and llama; `common` is not installed anywhere, so there chat templates are limited to
#                         llama_chat_apply_template's list and JSON schemas are refused
#   DT_LLAMA_SOURCE=DIR   an unpacked llama.cpp
#   otherwise             the pinned source distribution (deps/README.md): DT_LLAMA_SDIST, or fetched by pip into the cache folder
#                         (environment variable DT_CACHE, else deps/cache) and checked by its hash
# Everything is static and EXCLUDE_FROM_ALL: only what our targets link is compiled.

include("${CMAKE_CURRENT_LIST_DIR}/dt_cure_amx.cmake")
include("${CMAKE_CURRENT_LIST_DIR}/dt_patches.cmake")

set(DT_LLAMA_CPP_PYTHON_VERSION 0.3.36)
set(DT_LLAMA_SDIST_SHA256 832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e)

if(DEFINED ENV{DT_CACHE} AND NOT "$ENV{DT_CACHE}" STREQUAL "")
    set(DT_CACHE_DIR "$ENV{DT_CACHE}")
else()
    set(DT_CACHE_DIR "${CMAKE_CURRENT_SOURCE_DIR}/deps/cache")
endif()

function(dt_fetch_llama_sdist file)
    find_package(Python3 3.9 QUIET COMPONENTS Interpreter)
    set(wanted "llama-cpp-python==${DT_LLAMA_CPP_PYTHON_VERSION}")
    set(by_hand "python3 -m pip download --no-deps --no-binary llama-cpp-python -d '${DT_CACHE_DIR}' ${wanted}")
    if(NOT Python3_Interpreter_FOUND)
        message(FATAL_ERROR "Python 3.9 or newer is needed to fetch ggml and libllama from PyPI. Install it: "
            "sudo apt-get install python3-pip (macOS: brew install python). Without it: put the file of ${wanted} somewhere and "
            "configure with -DDT_LLAMA_SDIST=FILE.")
    endif()
    message(STATUS "Fetching ${wanted} (75 MB: the source of ggml and libllama) with pip")
    file(MAKE_DIRECTORY "${DT_CACHE_DIR}/download")
    execute_process(
        COMMAND "${Python3_EXECUTABLE}" -m pip download --quiet --disable-pip-version-check --no-deps
                --no-binary llama-cpp-python --dest "${DT_CACHE_DIR}/download" ${wanted}
        RESULT_VARIABLE result ERROR_VARIABLE errors OUTPUT_VARIABLE output)
    get_filename_component(name "${file}" NAME)
    if(NOT result EQUAL 0 OR NOT EXISTS "${DT_CACHE_DIR}/download/${name}")
        message(FATAL_ERROR "pip could not fetch ${wanted}:\n${output}${errors}\n"
            "Is the network there, and pip (sudo apt-get install python3-pip)? By hand:\n  ${by_hand}")
    endif()
    file(RENAME "${DT_CACHE_DIR}/download/${name}" "${file}")
    file(REMOVE_RECURSE "${DT_CACHE_DIR}/download")
endfunction()

# Sets ${out} to the folder of the unpacked source.
function(dt_llama_source out)
    if(DT_LLAMA_SOURCE)
        if(NOT EXISTS "${DT_LLAMA_SOURCE}/ggml/CMakeLists.txt" OR NOT EXISTS "${DT_LLAMA_SOURCE}/common/chat.h")
            message(FATAL_ERROR "DT_LLAMA_SOURCE=${DT_LLAMA_SOURCE} is no llama.cpp source folder: it has no ggml/ and common/")
        endif()
        set(${out} "${DT_LLAMA_SOURCE}" PARENT_SCOPE)
        return()
    endif()
    set(name "llama_cpp_python-${DT_LLAMA_CPP_PYTHON_VERSION}")
    # other patches, another folder
    file(SHA256 "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/dt_patches.cmake" patches)
    string(SUBSTRING "${patches}" 0 8 patches)
    set(unpacked "${CMAKE_CURRENT_SOURCE_DIR}/deps/cache/llama.cpp-${DT_LLAMA_CPP_PYTHON_VERSION}-${patches}")
    set(${out} "${unpacked}" PARENT_SCOPE)
    # A file that was given is checked even where its content lies unpacked already: nobody should believe that it is used.
    set(file "${DT_LLAMA_SDIST}")
    if(file)
        set(advice "Give the right file, or have it fetched: -DDT_LLAMA_SDIST=")
        if(NOT EXISTS "${file}" OR IS_DIRECTORY "${file}")
            message(FATAL_ERROR "DT_LLAMA_SDIST=${file} is no file. ${advice}")
        endif()
    elseif(EXISTS "${unpacked}")
        return()
    else()
        set(file "${DT_CACHE_DIR}/${name}.tar.gz")
        set(advice "Remove it and configure again:\n  rm '${file}'")
        if(NOT EXISTS "${file}")
            dt_fetch_llama_sdist("${file}")
        endif()
    endif()
    file(SHA256 "${file}" hash)
    if(NOT hash STREQUAL DT_LLAMA_SDIST_SHA256)
        message(FATAL_ERROR
            "${file} is damaged or another version: its SHA-256 is ${hash}, not ${DT_LLAMA_SDIST_SHA256}. ${advice}")
    endif()
    if(EXISTS "${unpacked}")
        return()
    endif()
    message(STATUS "Unpacking llama.cpp from ${name}.tar.gz")
    set(temporary "${unpacked}.part")
    file(REMOVE_RECURSE "${temporary}")
    set(inside "${name}/vendor/llama.cpp")
    set(patterns "")
    foreach(entry CMakeLists.txt LICENSE cmake common ggml include licenses src tools vendor)
        list(APPEND patterns "${inside}/${entry}" "${inside}/${entry}/*")
    endforeach()
    file(ARCHIVE_EXTRACT INPUT "${file}" DESTINATION "${temporary}" PATTERNS ${patterns})
    dt_patch_llama("${temporary}/${inside}")
    file(RENAME "${temporary}/${inside}" "${unpacked}")
    file(REMOVE_RECURSE "${temporary}")
endfunction()

# The sources of llama.cpp's common that chat templates and JSON-schema grammars need: all but the command line, downloads, HTTP.
function(dt_add_llama_common source)
    file(GLOB sources "${source}/common/*.cpp" "${source}/common/jinja/*.cpp" "${source}/common/parsers/*.cpp")
    list(FILTER sources EXCLUDE REGEX
        "/common/(arg|console|debug|download|hf-cache|imatrix-loader|llguidance|preset|subproc)\\.cpp$")
    set(LLAMA_BUILD_NUMBER 0)
    set(LLAMA_BUILD_COMMIT "llama-cpp-python ${DT_LLAMA_CPP_PYTHON_VERSION}")
    set(BUILD_COMPILER "${CMAKE_C_COMPILER_ID}")
    set(BUILD_TARGET "${CMAKE_SYSTEM_NAME}")
    configure_file("${source}/common/build-info.cpp.in" "${CMAKE_BINARY_DIR}/deps/build-info.cpp")
    add_library(dt_llama_common STATIC EXCLUDE_FROM_ALL ${sources} "${CMAKE_BINARY_DIR}/deps/build-info.cpp")
    target_include_directories(dt_llama_common SYSTEM PUBLIC "${source}/common" "${source}/vendor")
    target_compile_options(dt_llama_common PRIVATE -w -O1) # templates are rendered once a turn: short builds matter more
    target_link_libraries(dt_llama_common PUBLIC llama Threads::Threads)
endfunction()

# A function, so that the settings of llama.cpp's build stay in here.
function(dt_build_llama source)
    set(BUILD_SHARED_LIBS ${DT_BACKENDS_LOADABLE})
    set(GGML_BACKEND_DL ${DT_BACKENDS_LOADABLE})
    set(GGML_NATIVE ${DT_NATIVE})
    if(DT_BACKENDS_LOADABLE) # ggml allows no native CPU backend then: one for AVX2, or, with GGML_CPU_ALL_VARIANTS, the best one here
        set(GGML_NATIVE OFF)
        set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
        set(CMAKE_INSTALL_RPATH "$ORIGIN")
    endif()
    set(GGML_CCACHE OFF) # ours
    set(GGML_BLAS OFF)
    set(GGML_METAL ${DT_METAL})
    set(GGML_METAL_EMBED_LIBRARY ON) # its default is what GGML_METAL was when the tree was first configured
    set(GGML_VULKAN ${DT_VULKAN})
    set(GGML_CUDA ${DT_CUDA})
    set(GGML_RPC ${DT_RPC})
    set(GGML_RPC_RDMA OFF) # one more library where it happens to be installed
    set(GGML_CUDA_NCCL OFF)
    set(GGML_CUDA_NO_VMM ON) # with it the programs would not even start where there is no driver
    # which pairs of key and value types fused attention is compiled for; caches hold no others
    set(GGML_CUDA_FA_QUANTS "f16-f16;q8_0-q8_0" CACHE STRING "of CUDA's fused attention")
    if(DT_CUDA_ARCHITECTURES)
        set(CMAKE_CUDA_ARCHITECTURES ${DT_CUDA_ARCHITECTURES})
    endif()
    if(DT_CCACHE_PROGRAM)
        set(CMAKE_CUDA_COMPILER_LAUNCHER ${DT_CCACHE_PROGRAM})
    endif()
    set(GGML_OPENMP OFF) # its barriers can't be made to yield from inside the process; see dt_patch_llama
    if(DT_BATCH_INVARIANT)
        set(GGML_LLAMAFILE OFF) # its tiles round differently for different batch sizes
    endif()
    foreach(part COMMON TESTS TOOLS EXAMPLES SERVER APP)
        set(LLAMA_BUILD_${part} OFF)
    endforeach()
    set(LLAMA_OPENSSL OFF)
    set(LLAMA_ALL_WARNINGS OFF)
    # Their build asks git for a revision and would find ours, and rebuild ggml after every commit.
    find_program(DT_FALSE_PROGRAM false)
    mark_as_advanced(DT_FALSE_PROGRAM)
    set(GIT_EXE ${DT_FALSE_PROGRAM})
    set(GIT_EXECUTABLE ${DT_FALSE_PROGRAM})
    # ggml's C calls its C++, and what that throws when memory runs out is caught above both (src/weights/ggml_calls.cpp)
    string(APPEND CMAKE_C_FLAGS " -fexceptions")
    if(CMAKE_BUILD_TYPE STREQUAL "Debug") # their assertions meet what files hold: a weight that is no number would end the process
        string(APPEND CMAKE_C_FLAGS " -DNDEBUG")
        string(APPEND CMAKE_CXX_FLAGS " -DNDEBUG")
    endif()
    if(DT_FUZZ) # what we hand on to libllama is looked for in there too
        set(flags "-fsanitize=fuzzer-no-link,address -fno-omit-frame-pointer -g1 -D_GLIBCXX_ASSERTIONS")
        string(APPEND CMAKE_C_FLAGS " ${flags}")
        string(APPEND CMAKE_CXX_FLAGS " ${flags}")
    endif()
    set(CMAKE_MESSAGE_LOG_LEVEL WARNING)
    add_subdirectory("${source}" "${CMAKE_BINARY_DIR}/deps/llama.cpp" EXCLUDE_FROM_ALL)
    foreach(target ggml ggml-base ggml-cpu llama) # no warnings of ours inside their headers
        if(TARGET ${target})
            get_target_property(directories ${target} INTERFACE_INCLUDE_DIRECTORIES)
        endif()
        if(TARGET ${target} AND directories)
            set_target_properties(${target} PROPERTIES INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${directories}")
        endif()
    endforeach()
    if(DT_SANITIZE MATCHES "thread") # the sanitizer has to see how ggml's threads wait for each other
        set_property(SOURCE "${source}/ggml/src/ggml-cpu/ggml-cpu.c" TARGET_DIRECTORY ggml-base
            APPEND PROPERTY COMPILE_OPTIONS -fsanitize=thread)
    endif()
    dt_cure_amx("${source}")
    dt_add_llama_common("${source}")
endfunction()

function(dt_add_llama)
    add_library(dt_llama INTERFACE)
    if(DT_SYSTEM_LLAMA)
        find_package(ggml CONFIG REQUIRED)
        find_package(llama CONFIG REQUIRED)
        target_link_libraries(dt_llama INTERFACE llama ggml::ggml)
        set(DT_HAVE_LLAMA_COMMON 0 PARENT_SCOPE)
        message(STATUS "ggml and llama: installed ones; no JSON schemas, chat templates limited to llama.cpp's built-in list")
        return()
    endif()
    dt_llama_source(source)
    set(DT_LLAMA_FOLDER "${source}" PARENT_SCOPE)
    dt_build_llama("${source}")
    target_link_libraries(dt_llama INTERFACE dt_llama_common llama ggml)
    set(DT_HAVE_LLAMA_COMMON 1 PARENT_SCOPE)
    message(STATUS "ggml and llama: built from ${source}")
endfunction()
