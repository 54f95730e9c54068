# cmake --install: the programs (./main as `deeptutor`) with pages for man and completion for shells, documents, examples, licences,
# and with -DDT_SHARED=ON the library for other programs: libdeeptutor, which holds ggml and libllama inside and exports the
# functions of deeptutor.h only, that header, deeptutor.pc and a CMake package.
include(GNUInstallDirs)

foreach(entry IN LISTS DT_PROGRAMS_HERE)
    string(REGEX REPLACE "=.*$" "" program "${entry}")
    if(program STREQUAL "main")
        install(PROGRAMS "$<TARGET_FILE:main>" DESTINATION "${CMAKE_INSTALL_BINDIR}" RENAME deeptutor)
    else()
        install(PROGRAMS "$<TARGET_FILE:${program}>" DESTINATION "${CMAKE_INSTALL_BINDIR}")
    endif()
endforeach()

install(FILES README.md README.zh.md CHANGELOG.md CONTRIBUTING.md LICENSE deps/sbom.cdx.json DESTINATION "${CMAKE_INSTALL_DOCDIR}")
install(DIRECTORY docs examples DESTINATION "${CMAKE_INSTALL_DOCDIR}")
# What those documents link to.
install(FILES deps/README.md DESTINATION "${CMAKE_INSTALL_DOCDIR}/deps")
install(DIRECTORY bench/results DESTINATION "${CMAKE_INSTALL_DOCDIR}/bench" FILES_MATCHING PATTERN "*.md" PATTERN "*.png")

# What is linked into the programs has licences of its own, which must go where they go.
set(licences "${CMAKE_CURRENT_SOURCE_DIR}/LICENSE")
if(NOT DT_SYSTEM_LLAMA)
    file(GLOB vendored "${DT_LLAMA_FOLDER}/licenses/LICENSE-*")
    list(APPEND licences "${DT_LLAMA_FOLDER}/LICENSE" ${vendored})
endif()
set(copyright "DeepTutor ${PROJECT_VERSION} and what is linked into its programs and library; deps/README.md says what comes from where.\n")
foreach(file IN LISTS licences)
    file(READ "${file}" text)
    string(REPLACE "${DT_LLAMA_FOLDER}/" "llama.cpp: " name "${file}")
    string(REPLACE "${CMAKE_CURRENT_SOURCE_DIR}/" "" name "${name}")
    string(APPEND copyright "\n==== ${name} ====\n${text}")
endforeach()
if(NOT DT_SYSTEM_LLAMA) # one file of ggml has other owners
    file(READ "${DT_LLAMA_FOLDER}/ggml/src/ggml-cpu/llamafile/sgemm.cpp" text LIMIT 4096)
    string(REGEX MATCH "^(//[^\n]*\n)+" text "${text}")
    string(REGEX REPLACE "(^|\n)// ?" "\\1" text "${text}")
    string(APPEND copyright "\n==== llama.cpp: ggml/src/ggml-cpu/llamafile/sgemm.cpp ====\n${text}")
endif()
file(WRITE "${CMAKE_BINARY_DIR}/copyright" "${copyright}")
install(FILES "${CMAKE_BINARY_DIR}/copyright" DESTINATION "${CMAKE_INSTALL_DOCDIR}")

# ggml, libllama and the backends, which are looked for beside ggml.
if(DT_BACKENDS_LOADABLE)
    install(TARGETS ggml ggml-base llama ${GGML_AVAILABLE_BACKENDS} LIBRARY DESTINATION "${DT_LIBRARIES_DIR}")
endif()

if(DT_SHARED)
    # Functions are declared at the beginning of a line of the header.
    file(STRINGS include/deeptutor.h declarations REGEX "^[a-z].*[ *]dt_[a-z0-9_]+\\(")
    set(exported "")
    foreach(line IN LISTS declarations)
        if(NOT line MATCHES "^typedef" AND line MATCHES "[ *](dt_[a-z0-9_]+)\\(")
            list(APPEND exported "${CMAKE_MATCH_1}")
        endif()
    endforeach()

    add_library(deeptutor_shared SHARED $<TARGET_OBJECTS:deeptutor>)
    set_target_properties(deeptutor_shared PROPERTIES OUTPUT_NAME deeptutor EXPORT_NAME deeptutor LINKER_LANGUAGE CXX
        VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
    if(DT_BACKENDS_LOADABLE)
        set_target_properties(deeptutor_shared PROPERTIES INSTALL_RPATH "$ORIGIN/deeptutor")
    endif()
    target_include_directories(deeptutor_shared INTERFACE
        "$<BUILD_INTERFACE:${CMAKE_CURRENT_SOURCE_DIR}/include>" "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")
    target_link_libraries(deeptutor_shared PRIVATE
        "$<BUILD_INTERFACE:dt_options>" "$<BUILD_INTERFACE:dt_llama>" "$<BUILD_INTERFACE:dt::jansson>"
        "$<BUILD_INTERFACE:Threads::Threads>" m)
    if(APPLE)
        list(TRANSFORM exported PREPEND "_" OUTPUT_VARIABLE names)
        string(REPLACE ";" "\n" names "${names}")
        file(WRITE "${CMAKE_BINARY_DIR}/deeptutor.symbols" "${names}\n")
        target_link_options(deeptutor_shared PRIVATE "-Wl,-exported_symbols_list,${CMAKE_BINARY_DIR}/deeptutor.symbols")
    else()
        string(REPLACE ";" "; " names "${exported}")
        file(WRITE "${CMAKE_BINARY_DIR}/deeptutor.symbols" "{ global: ${names}; local: *; };\n")
        target_link_options(deeptutor_shared PRIVATE "-Wl,--version-script=${CMAKE_BINARY_DIR}/deeptutor.symbols")
    endif()

    include(CMakePackageConfigHelpers)
    set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/deeptutor")
    install(TARGETS deeptutor_shared EXPORT deeptutor-targets LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
    install(FILES include/deeptutor.h DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
    install(EXPORT deeptutor-targets NAMESPACE deeptutor:: FILE deeptutor-config.cmake DESTINATION "${package_dir}")
    write_basic_package_version_file("${CMAKE_BINARY_DIR}/deeptutor-config-version.cmake" COMPATIBILITY SameMinorVersion)
    install(FILES "${CMAKE_BINARY_DIR}/deeptutor-config-version.cmake" DESTINATION "${package_dir}")
    file(RELATIVE_PATH DT_PC_TO_PREFIX "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/") # the installed tree may be moved
    configure_file(cmake/deeptutor.pc.in "${CMAKE_BINARY_DIR}/deeptutor.pc" @ONLY)
    install(FILES "${CMAKE_BINARY_DIR}/deeptutor.pc" DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
endif()
