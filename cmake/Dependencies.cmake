# Every library that is not ours. Debian 12's packages by default; LibTorch from anywhere through
# CMAKE_PREFIX_PATH.
find_package(Threads REQUIRED)
find_package(OpenSSL REQUIRED)
find_package(Protobuf REQUIRED)
find_package(gRPC CONFIG REQUIRED)
find_package(absl CONFIG REQUIRED)
find_package(prometheus-cpp CONFIG REQUIRED)
if(MAMBASCOPE_CUDA)
  set(TORCH_CUDA_ARCH_LIST 8.0 9.0 10.0)   # TorchConfig asks a GPU when it is not told
endif()
find_package(Torch REQUIRED)
find_package(hwy REQUIRED)
find_package(PNG REQUIRED)
find_package(JPEG REQUIRED)

# Torch brings its flags as one string; ours are set per target.
set(CMAKE_CXX_FLAGS "${CMAKE_CXX_FLAGS} ${TORCH_CXX_FLAGS}")
# LibTorch's headers raise warnings that are not ours to mend.
set_target_properties(torch PROPERTIES SYSTEM ON)

# BLIS is linked as an archive and its names are hidden: it also exports sgemm_ and cblas_sgemm,
# which LibTorch must keep finding in its own BLAS.
find_path(BLIS_INCLUDE_DIR blis.h PATH_SUFFIXES blis-serial x86_64-linux-gnu/blis-serial REQUIRED)
find_library(BLIS_ARCHIVE libblis.a PATH_SUFFIXES blis-serial REQUIRED)
add_library(blis INTERFACE)
target_include_directories(blis SYSTEM INTERFACE ${BLIS_INCLUDE_DIR})
target_link_libraries(blis INTERFACE ${BLIS_ARCHIVE} m Threads::Threads)
target_link_options(blis INTERFACE -Wl,--exclude-libs,libblis.a)

find_path(CLI11_INCLUDE_DIR CLI/CLI.hpp REQUIRED)
find_path(HTTPLIB_INCLUDE_DIR httplib.h REQUIRED)
find_library(HTTPLIB_LIBRARY NAMES cpp-httplib REQUIRED)
find_path(NLOHMANN_JSON_INCLUDE_DIR nlohmann/json.hpp REQUIRED)
