# A Debian package, by CPack (deps/README.md has the commands):
#
#   cmake -B build-package -DDT_PACKAGE=ON && cmake --build build-package -j 4 && (cd build-package && cpack)
#
# A package runs on machines that nobody here has seen, so it is never made of a tree that compiled for its own (DT_NATIVE). ggml is
# built for any x86-64 processor with AVX2, FMA and F16C (2013 and later); the kernels of attention and matrix products, in which
# nearly all time goes, are ours and chosen at run time up to AVX-512 and AMX. A processor without AVX2 is told so in a sentence.
if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux" OR DT_NATIVE)
    return()
endif()

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME deeptutor)
set(CPACK_PACKAGE_VERSION "${PROJECT_VERSION}")
set(CPACK_PACKAGE_VENDOR DeepTutor)
set(CPACK_PACKAGE_CONTACT "The DeepTutor developers <deeptutor@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "language models with long contexts, with layer-wise KV cache eviction")
set(CPACK_PACKAGING_INSTALL_PREFIX "${CMAKE_INSTALL_PREFIX}")
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_SUGGESTS "curl, python3")
set(CPACK_DEBIAN_PACKAGE_DESCRIPTION "Runs decoder language models from GGUF files and decides layer by layer how
many tokens of the context each layer keeps, so that long texts stay fast and
fit into memory. With programs for the command line, a server that speaks
OpenAI's API, batch jobs, benchmarks and quality measurements, and the library
with its header. On x86-64 it needs a processor with AVX2.")
# Debian wants these two compressed, and in these places.
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
find_program(DT_GZIP_PROGRAM gzip)
mark_as_advanced(DT_GZIP_PROGRAM)
install(CODE "if(\"\${CMAKE_INSTALL_PREFIX}\" STREQUAL \"/usr\" AND NOT \"${DT_GZIP_PROGRAM}\" STREQUAL \"\")
    file(GLOB pages \"\$ENV{DESTDIR}/usr/share/man/man1/deeptutor*.1\")
    execute_process(COMMAND \"${DT_GZIP_PROGRAM}\" -9nf \${pages})
    execute_process(COMMAND \"${DT_GZIP_PROGRAM}\" -9nc CHANGELOG.md
        WORKING_DIRECTORY \"\$ENV{DESTDIR}/usr/share/doc/deeptutor\"
        OUTPUT_FILE \"\$ENV{DESTDIR}/usr/share/doc/deeptutor/changelog.gz\")
endif()")
include(CPack)
