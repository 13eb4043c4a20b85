from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ShardingSpec(_message.Message):
    __slots__ = ("sharding_spec",)
    SHARDING_SPEC_FIELD_NUMBER: _ClassVar[int]
    sharding_spec: str
    def __init__(self, sharding_spec: _Optional[str] = ...) -> None: ...

class LayoutProto(_message.Message):
    __slots__ = ("sharding_specs", "mesh_config", "type")
    class LayoutType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNKNOWN: _ClassVar[LayoutProto.LayoutType]
        STATIC: _ClassVar[LayoutProto.LayoutType]
        PARTED: _ClassVar[LayoutProto.LayoutType]
        SINGLE_DEVICE: _ClassVar[LayoutProto.LayoutType]
    UNKNOWN: LayoutProto.LayoutType
    STATIC: LayoutProto.LayoutType
    PARTED: LayoutProto.LayoutType
    SINGLE_DEVICE: LayoutProto.LayoutType
    SHARDING_SPECS_FIELD_NUMBER: _ClassVar[int]
    MESH_CONFIG_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    sharding_specs: _containers.RepeatedCompositeFieldContainer[ShardingSpec]
    mesh_config: MeshProto
    type: LayoutProto.LayoutType
    def __init__(self, sharding_specs: _Optional[_Iterable[_Union[ShardingSpec, _Mapping]]] = ..., mesh_config: _Optional[_Union[MeshProto, _Mapping]] = ..., type: _Optional[_Union[LayoutProto.LayoutType, str]] = ...) -> None: ...

class MeshDimensionProto(_message.Message):
    __slots__ = ("name", "size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class MeshProto(_message.Message):
    __slots__ = ("mesh_dimensions", "global_device_ids", "local_device_ids", "local_devices", "global_devices", "name", "use_xla_spmd", "single_device")
    MESH_DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_DEVICE_IDS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_DEVICE_IDS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_DEVICES_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_DEVICES_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    USE_XLA_SPMD_FIELD_NUMBER: _ClassVar[int]
    SINGLE_DEVICE_FIELD_NUMBER: _ClassVar[int]
    mesh_dimensions: _containers.RepeatedCompositeFieldContainer[MeshDimensionProto]
    global_device_ids: _containers.RepeatedScalarFieldContainer[int]
    local_device_ids: _containers.RepeatedScalarFieldContainer[int]
    local_devices: _containers.RepeatedScalarFieldContainer[str]
    global_devices: _containers.RepeatedScalarFieldContainer[str]
    name: str
    use_xla_spmd: bool
    single_device: str
    def __init__(self, mesh_dimensions: _Optional[_Iterable[_Union[MeshDimensionProto, _Mapping]]] = ..., global_device_ids: _Optional[_Iterable[int]] = ..., local_device_ids: _Optional[_Iterable[int]] = ..., local_devices: _Optional[_Iterable[str]] = ..., global_devices: _Optional[_Iterable[str]] = ..., name: _Optional[str] = ..., use_xla_spmd: bool = ..., single_device: _Optional[str] = ...) -> None: ...
