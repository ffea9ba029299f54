# How our own code is compiled; applied to it only, through the target mambascope_options.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
# -O3 only where loops are the product (kernels/CMakeLists.txt): elsewhere it costs build time.
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -DNDEBUG")

add_library(mambascope_options INTERFACE)
target_include_directories(mambascope_options INTERFACE ${CMAKE_SOURCE_DIR})
# Device code has flags of its own (Cuda.cmake).
set(cxx $<COMPILE_LANGUAGE:C,CXX>)
target_compile_options(mambascope_options INTERFACE
  "$<${cxx}:-Wall;-Wextra>" $<$<AND:${cxx},$<BOOL:${MAMBASCOPE_WERROR}>>:-Werror>)
# Contraction to FMA is left to the SIMD bodies, which name it: the same source gives the same bits
# whatever the compiler thinks of a loop.
target_compile_options(mambascope_options INTERFACE $<${cxx}:-ffp-contract=off>)

if(MAMBASCOPE_SANITIZE)
  # Kernels and scans at -O0 would take minutes; -O1 with line numbers keeps the reports readable.
  set(CMAKE_CXX_FLAGS_DEBUG "-O1 -g1")
  add_compile_options(-fsanitize=${MAMBASCOPE_SANITIZE} -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${MAMBASCOPE_SANITIZE})
  if(MAMBASCOPE_SANITIZE STREQUAL thread)
    # Protobuf's map fields have one member more where this is defined, which Debian's libprotobuf,
    # built without the sanitizer, does not know.
    add_compile_options(-U__SANITIZE_THREAD__)
  endif()
endif()

find_program(CCACHE ccache)
if(CCACHE)
  # Paths below the source folder are hashed relative to it, so that every clone shares the cache.
  set(launcher ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${CMAKE_SOURCE_DIR} ${CCACHE})
  set(CMAKE_C_COMPILER_LAUNCHER ${launcher})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${launcher})
endif()
